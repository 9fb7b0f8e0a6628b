"""A few of the faults that ``scripts/faults.sh`` tries, one in each way that a rank can go on or end, and that each judgement
can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from faults import cases
from faults.ranks import Fault, Ranks
from faults.witness import WRONG


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, standin) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("faults"), "1", cuda=standin.library.parent)
    made.left["uvm"] = 2 << 20  # the block that reads are compared with stays
    yield made
    made.close()


def call(phase: str, fail: str, *reasons: str) -> Fault:
    return Fault("CUDA call", phase, fail, {"action": "cuda call", "value": fail}, reasons)


MOVE = call("re-advise", "cudaMemPrefetchAsync:1:2", "out of memory")
LOAD = call("load", "cudaMallocManaged:2:2", "out of memory")
STICKY = call("serve", "cudaLaunchKernel:5:719!", "unspecified launch failure")


def test_a_move_that_fails_is_shown_and_the_rank_serves_on(ranks):
    outcome = ranks.judge(MOVE)
    assert (outcome.end, outcome.answers > 5) == ("served on", True), outcome
    assert "cudaMemPrefetchAsync to host failed" in outcome.detail


@pytest.mark.parametrize("fault", [LOAD, STICKY], ids=lambda fault: fault.phase)
def test_a_failure_that_nobody_survives_is_named(ranks, fault):
    outcome = ranks.judge(fault)
    assert outcome.end == "stopped with a reason", outcome


def test_what_a_killed_save_leaves_is_gone_after_the_next_start(ranks):
    (killed,) = [f for f in cases.signals() if f.what == "SIGKILL in a save, before the rename"]
    assert ranks.judge(killed).end == "ended by the signal"


def test_another_reason_than_the_true_one_is_no_reason(ranks):
    assert ranks.judge(replace(LOAD, reasons=("operation not supported",))).end == "no reason"


def test_a_byte_that_changes_is_a_wrong_answer(ranks):
    spoil = {"action": "spoil", "value": "experts"}
    assert ranks.judge(Fault("bytes", "serve", "one changes", spoil)).end == "wrong answer"


def test_a_byte_of_a_slot_that_changes_is_a_wrong_answer(ranks):
    spoil = {"action": "spoil", "value": "slots", "slots": cases.NUM_SLOTS}
    assert ranks.judge(Fault("bytes", "serve", "one of each slot changes", spoil)).end == "wrong answer"


@pytest.mark.parametrize("backend", ["uvm", "emulated"])
def test_a_stream_reads_its_slots_and_a_byte_of_one_that_changes_is_a_wrong_answer(ranks, backend):
    spoil = {"action": "spoil", "value": "slots", "slots": cases.ROOM, "backend": backend}
    assert ranks.judge(Fault("bytes", "stream", "one of each slot changes", spoil)).end == "wrong answer"


WATCHED = """
from faults import rank, witness
watching = witness.Witness()
look, looked = watching.{look}, []
watching.{look} = lambda *what: (looked.append(what), look(*what))
witness.watch(watching)
rank.main({job!r})
print("looks:", len(looked))
"""


@pytest.mark.parametrize(
    ("slots", "look", "action", "wrong"),
    [
        (0, "look_at_buffer", "none", False),
        (cases.ROOM, "look_at_brought", "none", False),
        (cases.ROOM, "look_at_brought", "spoil", True),
    ],
)
def test_the_witness_looks_at_what_a_layer_that_streams_reads(ranks, tmp_path, slots, look, action, wrong):
    job = {"backend": "uvm", "folder": str(tmp_path), "slots": slots, "action": action, "value": "slots", "phase": "stream"}
    ended = ranks.nursery.run(WATCHED.format(look=look, job=job))
    assert (WRONG in ended.out) == wrong, ended.out
    assert not ended.out.endswith("looks: 0\n")
    assert "looks: " in ended.out, ended.err


@pytest.mark.parametrize("launch", [1, 2], ids=["choosing", "copying"])
def test_a_stream_into_slots_that_fails_is_shown_and_the_rank_serves_on(ranks, launch):
    fail = {"within": f"{cases.SLOTS}.bring", "value": f"cudaLaunchKernel:{launch}:2"}
    outcome = ranks.judge(Fault("CUDA call", "stream", "bring", {"action": "cuda call", **fail, "slots": cases.ROOM}))
    assert (outcome.end, outcome.answers > 5) == ("served on", True), outcome
    assert "failed on the experts of layer" in outcome.detail


@pytest.mark.parametrize(("value", "end"), [("told", "served on"), ("untold", "wrong answer")])
def test_slots_that_are_not_told_of_new_weights_give_wrong_answers(ranks, value, end):
    job = {"action": "weights", "value": value, "backend": "emulated", "slots": cases.NUM_SLOTS}
    outcome = ranks.judge(Fault("weights", "serve", value, job))
    assert outcome.end == end, outcome


def test_a_fault_that_cannot_be_armed_is_not_taken_for_one_that_nothing_meets(ranks):
    job = {"action": "thread", "call": "faults.model:Gone.move", "k": 1, "value": "MemoryError", "backend": "emulated"}
    assert ranks.judge(Fault("thread", "load", "a method that is gone", job)).end == "no reason"


def test_a_fault_that_nothing_meets_is_not_counted(ranks):
    assert ranks.judge(call("look", "cudaFree:99:2")).end == "not reached"

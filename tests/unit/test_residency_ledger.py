"""Counts that arrive late are booked under the residents that served them, and nobody waits for them unasked."""

from __future__ import annotations

import numpy as np
import pytest
from builders.managers import LAYERS, Rank, config

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.routing.counts import Phase


class Late(CpuRoutingCounters):
    """Counts arrive when the test says so."""

    arrived = True

    def read_async(self):
        asked, counts = super().read_async(), self
        asked_at = sum(self._steps)

        class OnItsWay:
            def ready(self):
                return counts.arrived or asked_at == 0

            def wait(self):
                return asked.wait()

        return OnItsWay()


def rank_with_late_counts(**flags) -> Rank:
    rank = Rank(config(resident_selection="first_n", **flags), make_counters=Late)
    rank.model.counters.arrived = False
    return rank


def make_resident(rank: Rank, ids: list[int]) -> None:
    for layer in rank.model.layers:
        wanted = np.isin(np.arange(layer.num_experts), ids)
        layer.demote(wanted)
        layer.promote(wanted)


@pytest.mark.parametrize("asked", ["polls", "catches up"])
def test_steps_are_booked_once_under_the_residents_they_had_however_late_their_counts_are(asked):
    rank = rank_with_late_counts()
    ledger = rank.manager.ledger
    rank.step([[0, 1, 7]])
    assert ledger.poll(), "nothing was on its way yet"
    make_resident(rank, [5, 6, 7])
    rank.step([[0, 5, 6, 7]])
    assert not ledger.poll()
    assert ledger.steps == 0
    if asked == "polls":
        rank.model.counters.arrived = True
        ledger.poll()
    else:
        ledger.catch_up()
    make_resident(rank, [3])
    rank.step([[3, 4]])
    for _ in range(2):
        ledger.poll() if asked == "polls" else ledger.catch_up()
        assert ledger.steps == 3
        assert ledger.routed_resident.tolist() == [2 + 3 + 1] * LAYERS
        assert ledger.zero_copy_bytes.tolist() == [(1 + 1 + 1) * PAGE_BYTES] * LAYERS


def test_a_step_that_streams_is_booked_by_what_it_copies_and_reads_nothing_in_place():
    rank = Rank(config(resident_selection="first_n"))
    ledger = rank.manager.ledger
    rank.step([[0, 7], [1, 7], [7, 6]], phase=Phase.PREFILL, streams=True)
    for layer, nbytes in ((0, 5), (2, 3), (2, 4)):
        ledger.add_streamed(layer, nbytes * PAGE_BYTES)
    ledger.catch_up()
    assert ledger.streamed_bytes.tolist() == [5 * PAGE_BYTES, 0, 7 * PAGE_BYTES]
    assert (ledger.routed.tolist(), ledger.routed_resident.tolist()) == ([6] * LAYERS, [2] * LAYERS)
    assert not ledger.zero_copy_bytes.any()
    assert not ledger.activated_bytes.any()
    assert ledger.byte_hit_rate is None
    rank.step([[0, 7]], phase=Phase.PREFILL)
    ledger.catch_up()
    assert ledger.zero_copy_bytes.tolist() == [PAGE_BYTES] * LAYERS
    assert ledger.byte_hit_rate == 0.5


def test_residents_that_change_while_counts_are_late_do_not_change_what_was_before():
    """As on a rank that follows the decision of another, whose counts were there."""
    rank = rank_with_late_counts(adapt="continuous")
    peer = np.zeros((LAYERS, 8), dtype=bool)
    peer[:, [5, 6, 7]] = True
    decided = iter([None, None, peer.ravel(), None])
    rank.manager.residents.broadcast_decision = lambda decide: next(decided)
    for ids in ([0, 1, 7], [0, 5, 7], [0, 1, 5, 7]):
        rank.step([ids])
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    rank.model.counters.arrived = True
    rank.step([[2]])
    rank.manager.ledger.catch_up()
    assert rank.manager.ledger.routed_resident.tolist() == [2 + 1 + 2 + 0] * LAYERS


@pytest.mark.parametrize(("adapt", "asks"), [("warmup", True), ("continuous", False)])
def test_nobody_asks_between_the_looks_of_steps_that_all_look(adapt, asks):
    """What is asked for between them is not there at the next one, which would then wait for it before it moves."""
    rank = Rank(config(resident_selection="first_n", adapt=adapt))
    rank.step([[0, 1, 7]])
    before = rank.manager.ledger.pending
    rank.manager.poll()
    assert (rank.manager.ledger.pending is not before) == asks
    rank.manager.poll_when_idle()
    assert rank.manager.ledger.steps == 1


def test_the_ledger_counts_decode_activations_of_experts_that_can_be_offloaded():
    rank = Rank(config(resident_selection="first_n"), num_shared=1)
    rank.step([[0, 7, 8], [0, 6, 8]])
    rank.step([[0, 7, 8]], phase=Phase.PREFILL)
    ledger = rank.manager.ledger
    rank.manager.poll()
    assert ledger.activations.tolist() == [3] * LAYERS
    assert ledger.activations_resident.tolist() == [1] * LAYERS
    rank.model.layers[0].tensors.clear()
    rank.model.layers[0]._note_tensors()  # as where experts are too small to place: their weights are in plain VRAM
    rank.step([[0, 7, 8]])
    rank.manager.poll()
    assert ledger.activations.tolist() == [3, 5, 5]
    layer = rank.status()["layers"][1]
    assert (layer["experts"], layer["shared_experts"], layer["activations"], layer["activations_resident"]) == (8, 1, 5, 2)
    assert (layer["layer"], layer["first_expert"], layer["expert_bytes"]) == (2, 0, PAGE_BYTES)

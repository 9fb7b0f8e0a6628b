"""What the schedulers of broken engines say of the experts' bytes is judged, and time is shared out."""

from __future__ import annotations

import pytest
from faults import run
from faults.engines import judge_bytes
from faults.ranks import Fault, Outcome
from faults.served import ARMED
from faults.witness import WRONG, Look

GOOD = Look("00c0ffee", 4 << 20, 1)
LOG = f"{ARMED}cuda call\n"


def end(log: str, expected: Look = GOOD, before: str = "served on") -> str:
    outcome = Outcome("engines", "CUDA call", "serve", "cudaMalloc 1", before)
    judge_bytes(Fault("CUDA call", "serve", "cudaMalloc 1", {}), log, expected, outcome)
    return outcome.end


def test_the_same_bytes_after_each_step_are_right():
    assert end(f"{LOG}  0%|  | 0/4{GOOD}50%|{GOOD}\n") == "served on"


@pytest.mark.parametrize("before", ["served on", "stopped with a reason"])
@pytest.mark.parametrize("seen", [str(GOOD._replace(checksum="00c0ffef")), f"{WRONG}slot 1 of layer 0, expert 3"])
def test_bytes_that_differ_once_are_a_wrong_answer_however_it_ended(seen, before):
    assert end(f"{LOG}{GOOD}\n{seen}\n{GOOD}\n", before=before) == "wrong answer"


def test_an_engine_whose_bytes_nobody_saw_is_not_taken_for_right():
    assert end(LOG) == "wrong answer"


def test_more_managed_bytes_than_without_the_fault_are_a_leak():
    assert end(f"{LOG}{GOOD}\n{GOOD._replace(managed_bytes=6 << 20)}\n") == "leak"


def test_a_fault_that_struck_nothing_is_not_counted():
    assert end(f"{LOG}{GOOD._replace(failures=0)}\n") == "not reached"
    assert end(f"{GOOD}\n") == "not reached"
    assert end("died before\n", before="no reason") == "not reached"


def test_what_comes_later_keeps_its_share_of_the_time(monkeypatch):
    monkeypatch.setattr(run.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(run, "SHARES", {"ranks": 0.5, "engines": 0.2, "servers": 0.3})
    assert run.end_of("ranks", ["engines", "servers"], until=200.0) == pytest.approx(150.0)
    assert run.end_of("engines", ["servers"], until=200.0) == pytest.approx(140.0)
    assert run.end_of("servers", [], until=200.0) == pytest.approx(200.0)

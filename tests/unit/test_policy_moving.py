"""The benchmark of moves and decisions that take time: the threads that it plays, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy import __main__ as benchmark
from benchmarks.policy import moving
from sglang_uvm_offload.residency import adaptation
from sglang_uvm_offload.routing.trace import Trace

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "policy"


def cases_in(folder: Path) -> list[moving.Case]:
    return [moving.Case(**case) for case in json.loads((folder / "moving.json").read_text())]


def test_a_thread_ends_one_task_after_the_other_when_their_time_has_passed():
    clock, began = moving.Clock(), []
    thread = moving.Thread(clock)
    thread.before_task = lambda: began.append(clock.now)
    first, second = (thread.submit(thread.spend, seconds) for seconds in (2.0, 0.5))
    assert (began, thread.busy, first.done()) == ([0.0], True, False)
    ends = {}
    for now in np.arange(0.25, 4, 0.25):
        clock.now = float(now)
        thread.run()
        for name, task in (("first", first), ("second", second)):
            if task.done():
                ends.setdefault(name, clock.now)
    assert ends == {"first": 2.0, "second": 2.5}
    assert not thread.busy


def test_a_decision_takes_its_time_on_the_thread_that_it_is_made_on():
    clock = moving.Clock()
    thread = moving.Thread(clock)
    move = thread.submit(thread.spend, 1.0)
    decision = moving.Deciding(thread).submit(lambda: "decided")
    clock.now = 1.0
    thread.run()
    assert (move.done(), decision.done()) == (True, False)
    clock.now = 1.0 + moving.DECISION_SECONDS
    thread.run()
    assert decision.result() == "decided"


@pytest.mark.slow
def test_residents_follow_later_where_moves_take_time(tmp_path, monkeypatch):
    """Traffic that changes, so that residents which the warm-up chose are of little use."""
    monkeypatch.setattr(moving, "RESIDENCIES", (0.5,))
    monkeypatch.setattr(moving, "move_gbps", lambda: 0.2)
    rng = np.random.default_rng(0)
    early, late = (rng.integers(first, first + 8, (400, 3, 2)) for first in (0, 8))
    Trace(np.concatenate([early, late]), np.full(16, 50), 16).save(tmp_path / "here.npz")
    benchmark.main(["moving", str(tmp_path / "here.npz"), "--out", str(tmp_path)])
    one, eight = cases_in(tmp_path)
    assert (one.batch, eight.batch) == moving.BATCHES
    no_time, *timed, static = one.hit_rate
    assert no_time > max(timed)
    assert min(timed) > static
    assert timed[-1] >= timed[0], "decisions that wait for moves"
    for case in (one, eight):
        assert (np.diff(np.array(case.step_seconds)[np.argsort(case.hit_rate)]) <= 1e-9).all()
    assert (tmp_path / "moving.md").read_text() == moving.markdown([one, eight])
    assert moving.ARRANGEMENTS[-1].burst == adaptation.BURST_SECONDS


def test_the_committed_text_is_that_of_the_committed_figures():
    assert (RESULTS / "moving.md").read_text() == moving.markdown(cases_in(RESULTS))


def test_what_is_shipped_is_the_last_arrangement_and_takes_less_time_than_the_first():
    assert moving.ARRANGEMENTS[-1].burst == adaptation.BURST_SECONDS
    first, last = (np.array([case.step_seconds[column] for case in cases_in(RESULTS)]) for column in (1, -2))
    assert (last <= first * 1.002).all()
    assert np.mean(last / first) < 1

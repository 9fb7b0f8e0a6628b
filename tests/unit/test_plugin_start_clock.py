"""The phases of a start, by a clock that the test sets."""

from __future__ import annotations

from sglang_uvm_offload.plugin.rank.start_clock import StartClock, StartPhase
from sglang_uvm_offload.residency.status import PhaseTime, described


class Now:
    def __init__(self, seconds: float):
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def seconds(clock: StartClock) -> dict[str, float]:
    return {phase.name: phase.seconds for phase in clock.phases()}


def test_each_second_belongs_to_one_phase():
    now = Now(1007.0)
    clock = StartClock(1000.0, now)
    with clock.timing(StartPhase.READ):
        now.seconds += 1
        with clock.timing(StartPhase.BUILD):
            now.seconds += 2
            with clock.timing(StartPhase.PLACE):
                now.seconds += 4
        now.seconds += 8
        with clock.timing(StartPhase.CONVERT):
            now.seconds += 16
    now.seconds += 32
    with clock.timing(StartPhase.GRAPHS):
        now.seconds += 64
    clock.end()
    assert seconds(clock) == {
        "launch": 7,
        "build": 2,
        "place experts": 4,
        "read": 9,
        "convert experts": 16,
        "graphs": 64,
        "rest": 32,
    }


def test_a_server_that_serves_starts_no_more():
    """Its weights may be updated, which passes through the same code."""
    now = Now(3.0)
    clock = StartClock(0.0, now)
    clock.end()
    with clock.timing(StartPhase.CONVERT):
        now.seconds += 5
    clock.add(StartPhase.READ, 7)
    assert seconds(clock) == {"launch": 3}


def test_a_clock_that_is_set_back_gives_no_negative_time():
    now = Now(100.0)
    clock = StartClock(0.0, now)
    with clock.timing(StartPhase.READ):
        now.seconds = 50.0
    now.seconds += 1
    clock.end()
    assert seconds(clock) == {"launch": 100, "rest": 1}


def test_the_line_has_bytes_and_rates():
    phases = [PhaseTime("launch", 4.0), PhaseTime("read", 2.0, 3 << 30), PhaseTime("place experts", 0.5, 1 << 20)]
    assert described(phases) == "6.5 s: launch 4.0 s, read 2.0 s (3.00 GiB at 1.50 GiB/s), place experts 0.5 s (1.0 MiB)"

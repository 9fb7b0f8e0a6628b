"""The line about a minute: what the counters of the status gained in it."""

from __future__ import annotations

from typing import Any

import pytest
from builders.managers import LAYERS, Rank, config

from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.residency.minutes import MINUTE_SECONDS, Minutes
from sglang_uvm_offload.units import size


class Serving:
    """A rank that adapts continuously, on a clock of its own, with 5 GiB of host RAM free."""

    def __init__(self):
        self.now = 0.0
        cfg = config(resident_selection="first_n", adapt="continuous")
        self.rank = Rank(cfg, clock=lambda: self.now)
        self.manager = self.rank.manager
        self.manager.begin_serving()
        self.minutes = Minutes(self.manager.ledger, self.manager.clock, lambda: 5 << 30)

    def serve(self, ids: list[list[int]], steps: int) -> dict[str, Any]:
        """The status after these steps."""
        for _ in range(steps):
            self.now += 0.1
            self.rank.step(ids)
        return self.rank.status()

    def end(self) -> str | None:
        """What the minute brought that ends now."""
        self.now = (self.now // MINUTE_SECONDS + 1) * MINUTE_SECONDS
        return self.minutes.ended()


def gained(before: dict[str, Any], after: dict[str, Any]) -> str:
    def new(name: str) -> int:
        return after["history"][name][-1] - before["history"][name][-1]

    hits = after["hit_rate"] * after["routed"] - (before["hit_rate"] or 0.0) * before["routed"]
    read = new("zero_copy_bytes") + new("streamed_bytes") + new("filled_bytes")
    return (
        f"in the last 60 s, {new('steps')} steps: hit rate {100 * hits / (after['routed'] - before['routed']):.1f} %, "
        f"{read / new('steps') / 2**20:.1f} MiB a step over the link, {after['moves'] - before['moves']} promotions, "
        f"{size(after['moved_bytes'] - before['moved_bytes'])} promoted and demoted; 5.00 GiB of host RAM free"
    )


def test_a_line_has_what_the_minute_brought_not_what_came_before():
    serving = Serving()
    loaded = serving.rank.status()
    first = serving.serve([[5, 6, 7]], 40)
    assert serving.end() == gained(loaded, first)
    serving.manager.ledger.add_streamed(1, 300 * PAGE_BYTES)
    serving.manager.ledger.filled_bytes[2] += 500 * PAGE_BYTES
    second = serving.serve([[5, 6, 0]], 20)
    assert first["moves"] > 0
    assert serving.end() == gained(first, second)


def test_residents_that_stay_have_plain_figures():
    serving = Serving()
    serving.manager.pause()
    serving.serve([[0, 7]] * 40, 16)
    serving.manager.ledger.add_streamed(0, 16 * (2 << 20))
    assert LAYERS * PAGE_BYTES == 0.1875 * 2**20
    assert serving.end() == (
        "in the last 60 s, 16 steps: hit rate 50.0 %, 2.2 MiB a step over the link, 0 promotions, 0.0 MiB promoted and "
        "demoted; 5.00 GiB of host RAM free"
    )


def test_there_is_none_while_a_minute_lasts_nor_for_an_idle_one():
    serving = Serving()
    assert serving.end() is None
    serving.serve([[0, 7]], 5)
    assert serving.minutes.ended() is None
    assert "in the last 60 s, 5 steps" in (serving.end() or "")
    assert serving.minutes.ended() is None
    assert serving.end() is None


@pytest.mark.parametrize("adapt", ["off", "warmup", "continuous"])
def test_only_continuous_adaptation_has_minutes(adapt):
    manager = Rank(config(resident_selection="first_n", adapt=adapt)).manager
    assert manager.minutes is None, "not before it serves"
    manager.begin_serving()
    assert (manager.minutes is not None) == (adapt == "continuous")

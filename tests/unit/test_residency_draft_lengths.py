"""The number of draft tokens while serving: by which measurements it is chosen, and that all ranks choose the same."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from builders import links
from builders.managers import LAYERS, Rank, config

from scripts.harness.patience import patience
from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.policy.draft_length import DECIDE_STEPS
from sglang_uvm_offload.residency.draft_lengths import DraftLengths, Gather, Key, MissMeter, Step
from sglang_uvm_offload.routing.counts import Phase

TIERS = (1, 2, 3)
COMPUTE = 0.001
OFFLOADED = [4, 5, 6, 7]
MISSED = LAYERS * PAGE_BYTES
"""Of one token of a step: each uses another offloaded expert."""


def alone(own: Any) -> list[Any]:
    return [own]


class Server:
    """One rank, whose steps take ``COMPUTE`` and the time of their misses over a link of ``link`` bytes a second. Results
    arrive once the next step is launched. Each draft is kept with the probability ``share``."""

    def __init__(self, link: float, share: float = 0.6, gather: Gather = alone, slower: float = 1.0, **flags: Any):
        self.rank = Rank(
            config(**{"resident_selection": "first_n", **flags}), link=links.status(scattered=link / 1e9), **self.counters()
        )
        self.link, self.share, self.slower = link, share, slower
        self.now, self.random = 0.0, random.Random(0)
        self.lengths = DraftLengths(self.rank.manager, gather, lambda: self.now)
        self.used: list[int] = []
        self.waiting: list[tuple[list[int], float]] = []
        """Of the steps in flight, what was accepted, and when they end."""

    def counters(self) -> dict[str, Any]:
        return {}

    def step(self, requests: int = 1, tiers: Sequence[int] = TIERS, resident: bool = False) -> None:
        """``resident``: it misses nothing."""
        drafts = self.lengths.choose(requests, tiers, tiers[-1])
        self.used.append(drafts)
        self.lengths.begin_step()
        self.rank.step([[0]] if resident else [[expert] for expert in OFFLOADED[: drafts + 1]])
        self.now += self.slower * (COMPUTE + (drafts + 1) * MISSED / self.link)
        kept = [0] * requests
        for request in range(requests):
            while kept[request] < drafts and self.random.random() < self.share:
                kept[request] += 1
        self.waiting.append((kept, self.now))
        if len(self.waiting) == 2:
            self.verify()

    def verify(self) -> None:
        kept, at = self.waiting.pop(0)
        now, self.now = self.now, at
        self.lengths.verified(kept)
        self.now = now

    def prefill(self, seconds: float) -> None:
        """Half of the time goes into launching it, before the results of the step before it are looked at."""
        self.rank.step([[0]] * 100, phase=Phase.PREFILL)
        kept, at = self.waiting.pop()
        self.waiting.append((kept, at + seconds / 2))
        self.verify()
        self.now += seconds


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
@pytest.mark.parametrize(("link", "drafts"), [(1000 * MISSED / COMPUTE, 3), (MISSED / COMPUTE, 1)])
def test_fewer_tokens_are_drafted_where_their_misses_take_longer_than_they_save(link: float, drafts: int, adapt: str) -> None:
    server = Server(link, adapt=adapt)
    server.rank.manager.pause()  # residents would follow these few experts
    for _ in range(600):
        server.step()
    assert set(server.used) == set(TIERS), "each was tried"
    (status,) = server.lengths.status()
    assert (status.requests, status.in_use, status.drafts) == (1, drafts, list(TIERS))
    assert server.lengths.drafts == server.used[-1]
    assert status.missed_bytes[TIERS.index(drafts)] == pytest.approx((drafts + 1) * MISSED, rel=0.001)
    kept = sum(0.6**position for position in range(drafts + 1))
    expected = kept / (COMPUTE + (drafts + 1) * MISSED / link)
    assert status.tokens_s[TIERS.index(drafts)] == pytest.approx(expected, rel=0.1)


def test_each_number_is_tried_at_the_start_for_a_trials_steps_and_those_in_flight() -> None:
    server = Server(1000 * MISSED / COMPUTE)
    for _ in range(60):
        server.step()
    runs = [(drafts, len(list(steps))) for drafts, steps in itertools.groupby(server.used)]
    each = DECIDE_STEPS + 1
    assert runs == [(3, each), (1, each), (3, each), (2, each), (3, 60 - 4 * each)]


def test_each_step_counts_in_what_steps_are_expected_to_miss() -> None:
    server = Server(1000 * MISSED / COMPUTE)
    for step in range(144):
        server.step(tiers=(3,), resident=step >= 72)
    (status,) = server.lengths.status()
    known = 72 - 2 * DECIDE_STEPS, 72
    assert (63 / 64) ** known[1] < status.missed_bytes[0] / (4 * MISSED) < (63 / 64) ** known[0]


def test_time_in_which_a_prompt_was_computed_is_none_of_a_step() -> None:
    server = Server(1000 * MISSED / COMPUTE)
    for step in range(200):
        server.step()
        if step % 5 == 0:
            server.prefill(10.0)
    (status,) = server.lengths.status()
    assert status.in_use == 3
    assert all(rate is not None and rate > 100 for rate in status.tokens_s)


def test_steps_of_many_requests_are_judged_apart_from_those_of_few() -> None:
    server = Server(1000 * MISSED / COMPUTE)
    for requests in (1, 3, 4, 1):
        for _ in range(50):
            server.step(requests)
    assert [status.requests for status in server.lengths.status()] == [1, 4]


def test_steps_whose_number_sglang_chooses_are_left_out() -> None:
    server = Server(1000 * MISSED / COMPUTE)
    for _ in range(40):
        server.step()
        server.lengths.leave()
        assert server.lengths.drafts is None
        server.lengths.begin_step()
        server.rank.step([[7]] * 100)
        server.now += 10.0
    (status,) = server.lengths.status()
    assert status.missed_bytes[TIERS.index(status.in_use)] == (status.in_use + 1) * MISSED
    assert status.tokens_s == [None, None, None], "no two of them followed each other"


class Late(CpuRoutingCounters):
    """Counts arrive when the test says so."""

    arrived = True

    def read_async(self) -> Any:
        asked, counters = super().read_async(), self

        class OnItsWay:
            def ready(self) -> bool:
                return counters.arrived

            def wait(self) -> Any:
                return asked.wait()

        return OnItsWay()


def test_misses_that_are_known_late_are_those_of_the_steps_that_had_them() -> None:
    rank = Rank(config(resident_selection="first_n"), make_counters=Late)
    observer, counters = rank.manager.observer, rank.model.counters
    meter, key = MissMeter(rank.manager.ledger), Key(TIERS, 1)

    def step(drafts: int, verified: bool = True) -> Step:
        launched = Step(key, drafts, 0, verified)
        meter.begin_step(launched)
        rank.step([[expert] for expert in OFFLOADED[: drafts + 1]])
        return launched

    observer.poll()
    first, second = step(1), step(1)
    observer.poll()
    counters.arrived = False
    step(3)
    step(2)
    assert meter.take(key) == [((first, second), 4 * MISSED)]
    assert meter.take(key) == []
    counters.arrived = True
    observer.poll()
    assert meter.take(key) == [], "nobody knows which of both missed how much"
    late = step(2, verified=False)
    observer.poll()
    assert meter.take(key) == [], "its results are not there"
    late.verified = True
    assert meter.take(Key(TIERS, 2)) == []
    assert meter.take(key) == [((late,), 3 * MISSED)]


class Together:
    """Gathers what ranks in threads of their own give."""

    def __init__(self, ranks: int):
        self.barrier, self.given = threading.Barrier(ranks, timeout=patience(10)), [None] * ranks

    def of(self, rank: int) -> Gather:
        def gather(own: Any) -> list[Any]:
            self.given[rank] = own
            self.barrier.wait()
            found = list(self.given)
            self.barrier.wait()
            return found

        return gather


def test_ranks_that_measure_other_bytes_and_times_choose_the_same() -> None:
    """The second one has a slow link: alone, it would draft one token."""
    together = Together(2)
    rates, used = (1000 * MISSED / COMPUTE, MISSED / COMPUTE), [list[int](), list[int]()]

    def serve(index: int) -> None:
        server = Server(rates[index], gather=together.of(index), slower=1.0 + index)
        for _ in range(600):
            server.step()
        used[index] = server.used

    threads = [threading.Thread(target=serve, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used[0] == used[1]
    assert len(used[0]) == 600
    assert statistics.mode(used[0][-200:]) == 1

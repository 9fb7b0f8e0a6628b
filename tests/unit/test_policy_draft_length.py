"""The number of drafts: what pays where verifying them reads over the link, what changes it, and what trying others costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from sglang_uvm_offload.policy.draft_length import (
    DECIDE_STEPS,
    EXPLORE,
    MARGIN,
    TRIAL_STEPS,
    Acceptance,
    ComputeSeconds,
    DraftLength,
    MissedBytes,
)

TIERS = (0, 1, 2, 3)
COMPUTE = (0.0020, 0.0021, 0.0022, 0.0023)
LINK = 50e9


@dataclass
class Server:
    """Serves one request: each draft is kept with the probability ``share``, and a step with k drafts misses
    ``missed * (1 + growth * k)`` bytes, and up to half of that more or less."""

    share: float
    missed: float
    growth: float = 0.75
    compute: Sequence[float] = COMPUTE
    random: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    kept: int = 0
    used: list[int] = field(default_factory=list)

    def serve(self, policy: DraftLength, steps: int) -> None:
        for _ in range(steps):
            drafts, right = policy.drafts, 0
            while right < drafts and self.random.random() < self.share:
                right += 1
            missed = self.missed * (1 + self.growth * drafts) * self.random.uniform(0.5, 1.5)
            self.seconds += self.compute[TIERS.index(drafts)] + missed / LINK
            self.kept += right + 1
            self.used.append(drafts)
            policy.observe([right], missed)

    def rate(self, drafts: int) -> float:
        """Kept tokens a second with a fixed number of drafts."""
        kept = sum(self.share**position for position in range(drafts + 1))
        return kept / (self.compute[TIERS.index(drafts)] + self.missed * (1 + self.growth * drafts) / LINK)

    def begin(self) -> None:
        self.seconds, self.kept, self.used = 0.0, 0, []


def policy(start: int = 3) -> DraftLength:
    return DraftLength(TIERS, COMPUTE, LINK, start)


@pytest.mark.parametrize("start", TIERS)
@pytest.mark.parametrize(("share", "missed", "best"), [(0.9, 1e6, 3), (0.65, 1e8, 1), (0.4, 5e8, 0)])
def test_the_number_with_the_most_kept_tokens_a_second_is_used(share: float, missed: float, best: int, start: int):
    server, chosen = Server(share, missed), policy(start)
    assert max(TIERS, key=server.rate) == best
    server.serve(chosen, 2000)
    server.begin()
    server.serve(chosen, 4000)
    assert server.kept / server.seconds > 0.97 * server.rate(best)


def test_with_the_same_acceptance_a_slower_link_takes_fewer_drafts():
    used = []
    for rate in (LINK, LINK / 100):
        chosen = DraftLength(TIERS, COMPUTE, rate, 3)
        Server(0.6, 1e6).serve(chosen, 2000)
        used.append(chosen.in_use)
    assert used == [3, 1]


def test_kept_tokens_are_those_before_the_first_wrong_draft_and_one_more():
    acceptance = Acceptance(3)
    for _ in range(500):
        acceptance.observe(3, [3, 1, 1, 0])
    assert acceptance.share() == pytest.approx([3 / 4, 1 / 3, 1], abs=0.01)
    assert [acceptance.kept(drafts) for drafts in range(4)] == pytest.approx([1, 7 / 4, 2, 9 / 4], abs=0.02)


def test_a_draft_that_was_never_made_is_kept_as_often_as_the_one_before_it():
    acceptance = Acceptance(2)
    for _ in range(500):
        acceptance.observe(1, [0])
    assert acceptance.share() == pytest.approx([0, 0], abs=0.01)


def test_new_tries_weigh_more_after_a_time_without_any():
    often, again = Acceptance(1), Acceptance(1)
    for acceptance in (often, again):
        for _ in range(1000):
            acceptance.observe(1, [0])
    again.observe(0, [0])
    for acceptance in (often, again):
        for _ in range(64):
            acceptance.observe(1, [1])
    assert again.share()[0] > 2 * often.share()[0]


def test_all_numbers_are_expected_to_miss_less_once_the_one_in_use_does():
    missed = MissedBytes()
    for level in (100e6, 10e6):
        for _ in range(600):
            missed.observe(1, level, in_use=True)
    assert missed.expected(1) == pytest.approx(10e6, rel=0.01)
    assert missed.expected(0) < 10e6 < missed.expected(3) < 10e6 * 3
    before = missed.expected(0)
    missed.observe(3, missed.expected(3), in_use=True)
    assert missed.expected(0) == pytest.approx(before), "another number is in use from now on"


@pytest.mark.parametrize("tried", [0, 3])
def test_trials_teach_how_misses_grow_and_leave_their_mean(tried: int):
    missed, in_use = MissedBytes(), 3 - tried
    of = {drafts: 1e6 * (1 + 0.3 * drafts) for drafts in TIERS}
    for _ in range(4000):
        missed.observe(in_use, of[in_use], in_use=True)
        missed.observe(tried, of[tried], in_use=False)
    assert missed.expected(in_use) == pytest.approx(of[in_use])
    assert missed.expected(tried) == pytest.approx(of[tried], rel=0.02)


def test_a_number_that_is_hardly_better_is_not_used():
    """Each draft that is kept pays for its own time, and a little more."""
    for better, used in ((MARGIN / 2, {0}), (4 * MARGIN, {1})):
        chosen = DraftLength((0, 1), (1.0, 2.0 / (1 + better)), LINK, 0)
        for _ in range(4000):
            chosen.observe([chosen.drafts], 0.0)
        assert {chosen.in_use} == used


@pytest.mark.parametrize("bad", [3, 10])
def test_trials_lose_little_of_the_time_however_bad_they_are(bad: float):
    """Steps with drafts take ``bad`` times as long, and none is kept."""
    server = Server(0.0, 0.0, compute=[COMPUTE[0], *(bad * seconds for seconds in COMPUTE[1:])])
    chosen = DraftLength(TIERS, server.compute, LINK, 0)
    server.serve(chosen, 100)  # each has its trial at the start
    assert set(server.used) == set(TIERS)
    server.begin()
    server.serve(chosen, 60_000)
    assert server.seconds < 60_000 * COMPUTE[0] * (1 + 1.2 * EXPLORE)
    assert len(set(server.used)) > 1, "some trials"


def test_drafts_begin_once_more_are_kept_though_none_is_made():
    server, chosen = Server(0.1, 1e7), policy()
    server.serve(chosen, 2000)
    assert chosen.in_use == 0
    server.share = 0.95
    server.serve(chosen, 20_000)
    assert chosen.in_use == 3


def test_drafts_begin_soon_after_residents_fit_the_traffic():
    """The mean tells of all numbers: there is no need for trials."""
    server, chosen = Server(0.6, 5e8, growth=0.8), policy()
    server.serve(chosen, 4000)
    assert chosen.in_use < 2
    server.missed = 1e5
    server.serve(chosen, 600)
    assert chosen.in_use == 3


@pytest.mark.parametrize("share", [0.1, 0.95])
def test_the_policy_learns_by_its_trials_how_misses_grow(share: float):
    """Whether it drafts meanwhile or not."""
    chosen, begun = policy(), MissedBytes().growth
    Server(share, 1e8, growth=0.2).serve(chosen, 40_000)
    assert chosen.in_use == (0 if share < 0.5 else 3)
    assert chosen.missed.growth < begun - 0.05


def test_nothing_changes_before_each_number_was_tried():
    """However good it is taken to be before any draft was made."""
    server, chosen = Server(0.9, 1e6), policy(0)
    while chosen.in_use == 0:
        server.serve(chosen, 1)
    assert set(server.used) == set(TIERS)


def test_ranks_that_observe_the_same_decide_the_same():
    ranks, drawn, used = [policy(), policy()], random.Random(0), []
    for _ in range(2000):
        used.append([rank.drafts for rank in ranks])
        seen = [drawn.randint(0, ranks[0].drafts)], drawn.uniform(1e6, 1e8)
        for rank in ranks:
            rank.observe(*seen)
    assert all(one == other for one, other in used)
    assert {one for one, _ in used} == set(TIERS)


def learned(server: Server, steps: int, chosen: DraftLength) -> DraftLength:
    """``chosen``, told the time of each step and not that of computing."""
    for _ in range(steps):
        drafts, right = chosen.drafts, 0
        while right < drafts and server.random.random() < server.share:
            right += 1
        missed = server.missed * (1 + server.growth * drafts) * server.random.uniform(0.5, 1.5)
        chosen.measured(drafts, missed, server.compute[TIERS.index(drafts)] + missed / LINK)
        chosen.observe([right])
    return chosen


@pytest.mark.parametrize(("share", "missed", "best"), [(0.9, 1e6, 3), (0.65, 1e8, 1), (0.4, 5e8, 0)])
def test_the_time_of_computing_is_learned_from_that_of_steps(share: float, missed: float, best: int):
    chosen = learned(Server(share, missed), 4000, DraftLength(TIERS, None, LINK, 3))
    assert chosen.in_use == best
    assert [chosen.compute.of(drafts) for drafts in TIERS] == pytest.approx(COMPUTE, rel=0.05)


def test_a_draft_whose_pass_takes_long_is_not_made():
    server = Server(0.8, 0.0, compute=[0.002, 0.004, 0.006, 0.008])
    assert learned(server, 4000, DraftLength(TIERS, None, LINK, 3)).in_use == 0


def test_steps_that_take_longer_for_all_numbers_change_none():
    """As a longer context has it: what is known of the other numbers is as old as their trials."""
    server, compute = Server(0.6, 1e6), ComputeSeconds({})
    chosen = learned(server, 2000, DraftLength(TIERS, None, LINK, 3))
    assert chosen.in_use == 3
    server.compute = [2 * seconds for seconds in COMPUTE]
    for _ in range(400):
        learned(server, 1, chosen)
        assert chosen.in_use == 3
    for _ in range(100):
        compute.observe(1, 1.0, in_use=True)
    compute.observe(2, 3.0, in_use=False)
    assert [compute.of(drafts) for drafts in (1, 2, 3)] == [1.0, 3.0, 3.0]
    for _ in range(1000):
        compute.observe(1, 2.0, in_use=True)
    assert [compute.of(drafts) for drafts in (1, 2)] == pytest.approx([2.0, 4.0])


def test_what_a_trial_has_shown_of_one_number_says_nothing_of_the_others():
    """Its steps were few: the next ones correct what is known of this number."""
    compute = ComputeSeconds({})
    for _ in range(100):
        compute.observe(1, 1.0, in_use=True)
    compute.observe(2, 3.0, in_use=False)
    for _ in range(60):
        compute.observe(2, 2.0, in_use=True)
    assert [compute.of(drafts) for drafts in (1, 2)] == pytest.approx([1.0, 2.0], abs=0.02)


def test_a_link_that_is_faster_than_it_is_taken_to_be_leaves_the_time_of_whole_steps():
    chosen = DraftLength((1, 2), None, LINK / 100, 1)
    for _ in range(200):
        chosen.measured(1, 1e8, 0.004)
        chosen.observe([1], drafts=1)
    assert chosen.compute.of(1) < 0
    assert chosen.seconds(1) == pytest.approx(0.004)


def test_nothing_is_tried_before_a_step_was_timed():
    chosen = DraftLength(TIERS, None, LINK, 2)
    for _ in range(1000):
        chosen.observe([1], 1e6)
    assert (chosen.in_use, chosen.drafts) == (2, 2)
    for _ in range(DECIDE_STEPS):
        chosen.measured(2, 1e6, 0.002)
        chosen.observe([1])
    assert chosen.drafts != 2


def test_a_step_that_was_launched_before_a_trial_is_none_of_it():
    chosen = DraftLength(TIERS, COMPUTE, LINK, 3)
    while chosen.drafts == 3:
        chosen.observe([1], 1e6)
    trial = chosen.drafts
    for _ in range(3):
        chosen.observe([1], 1e6, drafts=3)
    for _ in range(TRIAL_STEPS - 1):
        chosen.observe([0], 1e6)
        assert chosen.drafts == trial
    chosen.observe([0], 1e6)
    assert chosen.drafts == 3


def test_requests_of_one_batch_count_each():
    alone, batch = Acceptance(2), Acceptance(2)
    for right in (2, 0, 1, 2):
        alone.observe(2, [right])
    batch.observe(2, [2, 0, 1, 2])
    assert alone.share() == pytest.approx(batch.share())


@pytest.mark.parametrize(
    "arguments",
    [
        ((), (), LINK),
        ((0, 1), (1.0,), LINK),
        ((1, 0), (1.0, 1.0), LINK),
        ((1, 1), (1.0, 1.0), LINK),
        ((-1, 1), (1.0, 1.0), LINK),
        ((0, 1), (1.0, 0.0), LINK),
        ((0, 1), (1.0, 1.0), 0.0),
        ((0, 1), (1.0, 1.0), LINK, 2),
    ],
)
def test_arguments_that_do_not_match_are_refused(arguments: tuple):
    with pytest.raises(ValueError, match=r"tiers|link_rate"):
        DraftLength(*arguments)

"""Chooses how many tokens to draft while a server serves: measures what its verify steps miss and take, and asks the policy.

There is a policy for each set of numbers to choose from, and for each number of requests, in powers of two: steps of more
requests miss and take more. Each decides after some of its steps, on what all ranks have measured together. So all ranks decide
the same, although they measure different bytes and times.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_uvm_offload.policy.draft_length import DECIDE_STEPS, DraftLength
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.status import DraftLengthStatus
from sglang_uvm_offload.routing.counts import Phase

POLL_STEPS = DECIDE_STEPS // 2
"""Steps between two requests for the counts where nothing else polls them: those of a trial's first half arrive before it
ends."""
IN_FLIGHT = 2
"""Steps that SGLang launches before it looks at the results of the first one."""

Gather = Callable[[Any], list[Any]]
"""Returns the argument of each of the ranks that compute the same steps."""


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, total: float, count: int) -> None:
        self.total, self.count = self.total + total, self.count + count


class MissMeter:
    """Bytes that decode steps miss, by a tag of each step. The ledger learns of several steps at once, some steps late: what
    it learns of steps with different tags is left out."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._launched: deque[Hashable] = deque()
        """The tags of the decode steps of which the ledger does not know yet."""
        self._known = self._now()
        self._found: dict[Hashable, _Mean] = {}

    def begin_step(self, tag: Hashable) -> None:
        """Call it before each decode step that counts."""
        self._collect()
        self._launched.append(tag)

    def take(self, tag: Hashable) -> tuple[float, int] | None:
        """The mean of the steps with this tag since the last call, and their number; None without any."""
        self._collect()
        mean = self._found.pop(tag, None)
        return None if mean is None else (mean.total / mean.count, mean.count)

    def _collect(self) -> None:
        before, self._known = self._known, self._now()
        steps, missed = (now - then for now, then in zip(self._known, before, strict=True))
        tags = [self._launched.popleft() for _ in range(min(steps, len(self._launched)))]
        if tags and len(tags) == steps and len(set(tags)) == 1:
            self._found.setdefault(tags[0], _Mean()).add(missed, steps)

    def _now(self) -> tuple[int, int]:
        return self._ledger.counted.steps[Phase.DECODE], self._ledger.decode_missed_bytes


@dataclass(frozen=True)
class _Key:
    """Which policy: that of these numbers of drafts, for up to ``requests``."""

    tiers: tuple[int, ...]
    requests: int


@dataclass(frozen=True)
class _Launched:
    key: _Key
    drafts: int
    step: int
    """The target's steps before it."""


@dataclass
class _Chosen:
    """A policy, and what was measured since it last decided."""

    policy: DraftLength
    verified: list[tuple[int, Sequence[int]]] = field(default_factory=list)
    """Of each step its number of drafts, and how many were accepted of each request."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By the number of drafts."""


class DraftLengths:
    """All methods run on the thread that launches steps. Every rank that computes the same steps must call ``choose`` and
    ``verified`` at the same point, with the same arguments."""

    def __init__(self, manager: OffloadManager, gather: Gather, clock: Callable[[], float] = time.perf_counter):
        self.manager = manager
        self._gather = gather
        self._clock = clock
        manager.observer.catch_up()
        self._meter = MissMeter(manager.ledger)
        self._link_rate = min(gather(_link_rate(manager)))  # hosts may have measured different ones
        self._policies: dict[_Key, _Chosen] = {}
        self._launched: deque[_Launched] = deque(maxlen=IN_FLIGHT)
        """Those whose results were not looked at."""
        self._next: _Launched | None = None
        """The step that is launched next; None: its number of drafts is not chosen here."""
        self._verified: tuple[int, float] | None = None
        """Of the last step that was verified: ``step``, and when its results were there."""
        self._polled: tuple[Hashable, int] = (None, 0)
        """The tag of the steps since the counts were last requested, and their number."""

    def choose(self, requests: int, tiers: Sequence[int], start: int) -> int:
        """Which of ``tiers`` to draft in the step of so many requests that is launched next. ``start``: in the first step."""
        key = _Key(tuple(tiers), 1 << max(0, requests - 1).bit_length())
        if key not in self._policies:
            self._policies[key] = _Chosen(DraftLength(key.tiers, None, self._link_rate, start))
        self._next = _Launched(key, self._policies[key].policy.drafts, self.manager.steps)
        self._launched.append(self._next)
        return self._next.drafts

    def leave(self) -> None:
        """The number of drafts of the step that is launched next is not chosen here."""
        self._next = None

    @property
    def drafts(self) -> int | None:
        """Of the last step launched; None where it was not chosen here."""
        return None if self._next is None else self._next.drafts

    def begin_step(self) -> None:
        """Call it before each step of the target that counts as a decode step, before the manager's ``begin_step``: what is
        polled then is of whole steps."""
        tag = None if self._next is None else (self._next.key, self._next.drafts)
        if tag != self._polled[0] or self._polled[1] >= POLL_STEPS:
            self.manager.poll()
            self._polled = (tag, 0)
        self._polled = (tag, self._polled[1] + 1)
        self._meter.begin_step(tag)

    def verified(self, accepted: Sequence[int]) -> None:
        """The results of the earliest step of ``choose`` are there: so many drafts of each request were accepted."""
        if not self._launched:
            return
        step, now = self._launched.popleft(), self._clock()
        chosen = self._policies[step.key]
        chosen.verified.append((step.drafts, accepted))
        if self._verified is not None and step.step == self._verified[0] + 1:  # no prefill between the two
            chosen.seconds.setdefault(step.drafts, []).append(now - self._verified[1])
        self._verified = (step.step, now)
        if sum(drafts == chosen.policy.drafts for drafts, _ in chosen.verified) >= DECIDE_STEPS:
            self._decide(step.key, chosen)

    def _decide(self, key: _Key, chosen: _Chosen) -> None:
        own = {tier: found for tier in key.tiers if (found := self._meter.take((key, tier))) is not None}
        took = {tier: statistics.median(seconds) for tier, seconds in chosen.seconds.items()}
        ranks = self._gather((own, took))
        missed = {tier: max(found[tier] for found, _ in ranks if tier in found) for found, _ in ranks for tier in found}
        seconds = {tier: max(times[tier] for _, times in ranks if tier in times) for _, times in ranks for tier in times}
        policy, verified = chosen.policy, chosen.verified
        chosen.verified, chosen.seconds = [], {}
        for tier, (mean, steps) in missed.items():  # of some of these steps, and of some before
            for _ in range(steps):
                policy.missed.observe(tier, mean, tier == policy.in_use)
        for drafts, accepted in verified:
            policy.observe(accepted, None, seconds.get(drafts), drafts)

    def status(self) -> list[DraftLengthStatus]:
        """Of each policy: what it uses, and what it expects of each number."""
        return [
            DraftLengthStatus(
                requests=key.requests,
                in_use=chosen.policy.in_use,
                drafts=list(key.tiers),
                tokens_s=[_rate(chosen.policy, tier) for tier in key.tiers],
                kept=[chosen.policy.acceptance.kept(tier) for tier in key.tiers],
                missed_bytes=[round(chosen.policy.missed.expected(tier)) for tier in key.tiers],
            )
            for key, chosen in self._policies.items()
        ]


def _rate(policy: DraftLength, tier: int) -> float | None:
    return policy.rate(tier) if tier in policy.compute.known else None


def _link_rate(manager: OffloadManager) -> float:
    """Bytes a second, as measured. Without a measured link, what reads take counts as computing."""
    return float("inf") if manager.link is None else manager.link.measured.together.scattered * 1e9

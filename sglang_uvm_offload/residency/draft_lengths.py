"""Chooses how many tokens to draft while a server serves: measures what its verify steps miss and take, and asks the policy.

There is a policy for each set of numbers to choose from, and for each number of requests, in powers of two: steps of more
requests miss and take more. Each decides after some of its steps, on what all ranks have measured together. So all ranks decide
the same, although they measure different bytes and times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
MAX_SAMPLES = 64

Gather = Callable[[Any], list[Any]]
"""Returns the argument of each of the ranks that compute the same steps."""


class Key(NamedTuple):
    """Which policy: that of these numbers of drafts, for up to ``requests``."""

    tiers: tuple[int, ...]
    requests: int


@dataclass(eq=False)
class Step:
    """A decode step that was launched, or will be next."""

    key: Key | None
    """None: its number of drafts was not chosen here."""
    drafts: int
    number: int
    """The target's steps before it."""
    verified: bool = False
    """Whether its results are there."""
    seconds: float | None = None
    """What it took, None where that is not known."""


class Sample(NamedTuple):
    """Steps of one policy with the same number of drafts, and the bytes that they missed together."""

    steps: tuple[Step, ...]
    missed: int

    @property
    def seconds(self) -> float | None:
        """What they took together, if half of them at least were timed; else None."""
        timed = [step.seconds for step in self.steps if step.seconds is not None]
        return sum(timed) / len(timed) * len(self.steps) if 2 * len(timed) >= len(self.steps) else None


class MissMeter:
    """What decode steps miss. The ledger learns of several steps at once, some steps late: where these differ in their number
    of drafts, what each of them missed is not known."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._launched: deque[Step] = deque()
        """Those that the ledger does not know yet."""
        self._known = self._now()
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def begin_step(self, step: Step) -> None:
        """Call it before each decode step that counts."""
        self._collect()
        self._launched.append(step)

    def take(self, key: Key) -> list[Sample]:
        """Those of this policy that were not taken before, of steps whose results are there."""
        self._collect()
        taken = [sample for sample in self._samples if sample.steps[0].key == key and all(s.verified for s in sample.steps)]
        for sample in taken:
            self._samples.remove(sample)
        return taken

    def _collect(self) -> None:
        before, self._known = self._known, self._now()
        count, missed = (now - then for now, then in zip(self._known, before, strict=True))
        steps = tuple(self._launched.popleft() for _ in range(min(count, len(self._launched))))
        if steps and len(steps) == count and len({(step.key, step.drafts) for step in steps}) == 1 and steps[0].key:
            self._samples.append(Sample(steps, missed))

    def _now(self) -> tuple[int, int]:
        return self._ledger.counted.steps[Phase.DECODE], self._ledger.decode_missed_bytes


class Measured(NamedTuple):
    """Means over ``steps`` steps with the same number of drafts: bytes missed; and of those of them that were timed, bytes
    missed and seconds."""

    missed: float
    steps: int
    missed_of_timed: float
    seconds: float
    timed: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Measured:
        """There is at least one."""
        steps = sum(len(sample.steps) for sample in samples)
        timed = [(sample, sample.seconds) for sample in samples if sample.seconds is not None]
        count = sum(len(sample.steps) for sample, _ in timed)
        return cls(
            sum(sample.missed for sample in samples) / steps,
            steps,
            sum(sample.missed for sample, _ in timed) / max(1, count),
            sum(seconds for _, seconds in timed) / max(1, count),
            count,
        )


@dataclass
class _Chosen:
    """A policy, and the steps since it last decided, whose results are there."""

    policy: DraftLength
    verified: list[tuple[Step, Sequence[int]]] = field(default_factory=list)
    """With how many drafts were accepted of each request."""


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
        self._policies: dict[Key, _Chosen] = {}
        self._launched: deque[Step] = deque(maxlen=IN_FLIGHT)
        """Those of ``choose`` whose results are not there."""
        self._next: Step | None = None
        """The step that is launched next, or was launched last."""
        self._verified: tuple[int, float] | None = None
        """Of the last step that was verified: ``number``, and when its results were there."""
        self._polled: tuple[Any, int] = (None, 0)
        """What steps have in common since the counts were last requested, and how many they are."""

    def choose(self, requests: int, tiers: Sequence[int], start: int) -> int:
        """Which of ``tiers`` to draft in the step of so many requests that is launched next. ``start``: in the first step."""
        key = Key(tuple(tiers), 1 << max(0, requests - 1).bit_length())
        if key not in self._policies:
            self._policies[key] = _Chosen(DraftLength(key.tiers, None, self._link_rate, start))
        self._next = Step(key, self._policies[key].policy.drafts, self.manager.steps)
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
        step = self._next or Step(None, 0, self.manager.steps)
        kind, (polled, count) = (step.key, step.drafts), self._polled
        if kind != polled or count >= POLL_STEPS:
            self.manager.poll()
            count = 0
        self._polled = kind, count + 1
        self._meter.begin_step(step)

    def verified(self, accepted: Sequence[int]) -> None:
        """The results of the earliest step of ``choose`` are there: so many drafts of each request were accepted."""
        if not self._launched:
            return
        step, now = self._launched.popleft(), self._clock()
        followed = self._verified is not None and step.number == self._verified[0] + 1
        # A step other than a decode step, before or after this one, takes time of its own.
        if self._verified is not None and followed and self.manager.steps == step.number + 1 + len(self._launched):
            step.seconds = now - self._verified[1]
        step.verified, self._verified = True, (step.number, now)
        assert step.key is not None
        chosen = self._policies[step.key]
        chosen.verified.append((step, accepted))
        if sum(one.drafts == chosen.policy.drafts for one, _ in chosen.verified) >= DECIDE_STEPS:
            self._decide(step.key, chosen)

    def _decide(self, key: Key, chosen: _Chosen) -> None:
        samples = self._meter.take(key)
        own = {drafts: [sample for sample in samples if sample.steps[0].drafts == drafts] for drafts in key.tiers}
        ranks = self._gather({drafts: Measured.of(found) for drafts, found in own.items() if found})
        verified, chosen.verified = chosen.verified, []
        for drafts in key.tiers:
            measured = [of_rank[drafts] for of_rank in ranks if drafts in of_rank]
            if not measured:
                continue
            slowest = max(measured)  # the others wait for the rank that misses most
            for _ in range(slowest.steps - slowest.timed):
                chosen.policy.measured(drafts, slowest.missed)
            for _ in range(slowest.timed):
                chosen.policy.measured(drafts, slowest.missed_of_timed, slowest.seconds)
        for step, accepted in verified:
            chosen.policy.observe(accepted, drafts=step.drafts)

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

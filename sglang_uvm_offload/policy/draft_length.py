"""How many tokens to draft: by how many of them are kept, and by the bytes that verifying them reads over the link. Pure.

A step with k drafts verifies k + 1 tokens of each request. It keeps those before the first wrong draft, and one more:

    kept(k)    = 1 + p1 + p1 p2 + ... + p1 .. pk        tokens of a request; pi: of those drafts i whose predecessors were kept
    seconds(k) = compute(k) + missed bytes(k) / link rate

and the policy takes the k with the most kept tokens a second. Acceptance alone takes a larger k than pays where experts are
offloaded: each further token uses other experts, and a rejected one has read its own over the link in vain.

What is known of a number of drafts that is not in use gets old. So estimates are made of parts, which others keep up to date:

- pi is learned from every step that drafted at least i tokens. Before, it is taken to be as p of the draft before it.
- missed bytes(k) grow with k as 1 + growth * k ** SATURATION. Their mean follows the steps of the number in use, because
  residents and traffic change it for all k at once. The growth is learned in trials, of all numbers together.
- compute(k), where it is not known beforehand, is what a measured step took beyond reading its misses. Changes of that of the
  number in use count for all k, because they come from requests and their context.

Hysteresis: another number must be better by ``MARGIN``, so that noise does not change it in every step.

Exploration: a trial is ``TRIAL_STEPS`` steps with another number. A step with the number in use earns a credit of ``EXPLORE``
of its time, shared by the other numbers; a trial begins once its number has earned what it is expected to lose. So trials of
bad numbers are rare, those of good ones are frequent, and all together lose about ``EXPLORE`` of the time, however bad they
are. A trial that went better than expected makes the next one cheaper, so it comes sooner. Each number has one at the start.

Units: seconds, bytes, and bytes a second. Results depend on the arguments alone: ranks that observe the same decide the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

MARGIN = 0.01
EXPLORE = 0.005
TRIAL_STEPS = 8
LEAST_LOSS = 0.02
"""Of a trial's time, for what it may cost to change the number of drafts."""
DECIDE_STEPS = 8
"""Steps from one comparison to the next."""

KEPT = 0.7
"""The share of first drafts that are kept, before any is seen."""
PRIOR_TRIES = 4.0
WINDOW_TRIES = 1024.0
"""Earlier tries count as so many at most, and as ``RECALLED_TRIES`` after a time without any."""
RECALLED_TRIES = 256.0
GROWTH = 0.8
"""The bytes that one draft adds to those that a step misses, at the start: .76 to .87 in measured routing."""
SATURATION = 0.94
"""k drafts add as many times the bytes of one as k to this power, because they share experts: .92 to .96 there."""
MEAN_STEPS = 64
GROWTH_STEPS = 256.0
"""Time constants."""
LEAST_SLOPE = 0.3
"""Ratios of misses that hardly depend on the growth teach little of it."""
LEAST_SECONDS = 1e-6
"""Of a step. A link that is faster than ``link_rate`` reads more than a step seems to have time for."""


class Acceptance:
    """The share of drafts kept, by position, of those whose predecessors were kept."""

    def __init__(self, positions: int):
        self._tried = [0.0] * positions
        self._kept = [0.0] * positions
        self._fresh = [False] * positions

    def observe(self, drafts: int, accepted: Sequence[int]) -> None:
        """A step with ``drafts`` drafts of each request, of which so many were ``accepted``."""
        for position in range(len(self._tried)):
            tried = sum(position <= kept for kept in accepted) if position < drafts else 0
            if tried:
                self._remember(position, WINDOW_TRIES if self._fresh[position] else RECALLED_TRIES)
                self._tried[position] += tried
                self._kept[position] += sum(position < kept for kept in accepted)
            self._fresh[position] = position < drafts

    def _remember(self, position: int, tries: float) -> None:
        share = min(1.0, tries / self._tried[position]) if self._tried[position] else 1.0
        self._tried[position] *= share
        self._kept[position] *= share

    def share(self) -> list[float]:
        """By position."""
        shares, before = list[float](), KEPT
        for tried, kept in zip(self._tried, self._kept, strict=True):
            before = (kept + PRIOR_TRIES * before) / (tried + PRIOR_TRIES)
            shares.append(before)
        return shares

    def kept(self, drafts: int) -> float:
        """Tokens that a step with ``drafts`` drafts is expected to keep, of each request."""
        total, reached = 1.0, 1.0
        for share in self.share()[:drafts]:
            reached *= share
            total += reached
        return total


class MissedBytes:
    """Bytes that a step reads over the link, by its number of drafts."""

    def __init__(self) -> None:
        self.growth = GROWTH
        self._mean = 0.0
        """Of the steps of the number in use, which is ``_drafts``."""
        self._drafts = 0
        self._steps = 0

    def observe(self, drafts: int, missed: float, in_use: bool) -> None:
        """``in_use``: of the number that is in use, and not of a trial."""
        if in_use:
            self._mean = self.expected(drafts)  # of this number, if it is in use since the last step
            self._drafts = drafts
            self._steps += 1
            self._mean += (missed - self._mean) / min(self._steps, MEAN_STEPS)
        elif self._mean > 0:
            ratio = self._shape(drafts) / self._shape(self._drafts)
            slope = (drafts**SATURATION - self._drafts**SATURATION * ratio) / self._shape(self._drafts)
            error = missed / self._mean - ratio
            self.growth += error * slope / (slope * slope + LEAST_SLOPE) / GROWTH_STEPS
            self.growth = min(max(self.growth, 0.0), 1.0)

    def expected(self, drafts: int) -> float:
        return self._mean * self._shape(drafts) / self._shape(self._drafts)

    def _shape(self, drafts: int) -> float:
        """In misses of a step without drafts."""
        return 1 + self.growth * drafts**SATURATION


class ComputeSeconds:
    """Of a step that misses nothing, with its passes of the draft model, by its number of drafts. ``known``: for each number,
    or empty; then it is learned."""

    def __init__(self, known: Mapping[int, float]):
        self._own = dict(known)
        self._all = 0.0
        """Added to that of each number: what has changed for all since."""
        self._steps = dict.fromkeys(known, MEAN_STEPS)

    @property
    def known(self) -> Collection[int]:
        """The numbers of drafts of which it is known."""
        return self._own.keys()

    def observe(self, drafts: int, seconds: float, in_use: bool) -> None:
        """``in_use``: of the number that is in use, and not of a trial."""
        error = seconds - self._own.setdefault(drafts, seconds - self._all) - self._all
        steps = self._steps[drafts] = self._steps.get(drafts, 0) + 1
        if in_use and steps > MEAN_STEPS:
            self._all += error / MEAN_STEPS
        else:
            self._own[drafts] += error / min(steps, MEAN_STEPS)

    def of(self, drafts: int) -> float:
        """That of the nearest number where it is not known, 0 where none is."""
        nearest = min(self._own, key=lambda known: abs(known - drafts), default=None)
        return 0.0 if nearest is None else self._own[nearest] + self._all


class DraftLength:
    """Chooses among ``tiers`` the number of drafts of the next step, ``drafts``, for steps of about as many requests.

    ``compute_seconds``: of a step of each tier that misses nothing, with its passes of the draft model; None: learned from the
    steps. ``link_rate``: bytes a second at which a step reads what it misses; ``inf``: what it takes counts as computing."""

    def __init__(
        self, tiers: Sequence[int], compute_seconds: Sequence[float] | None, link_rate: float, start: int | None = None
    ):
        known = [] if compute_seconds is None else compute_seconds
        if not tiers or sorted(set(tiers)) != list(tiers) or tiers[0] < 0:
            raise ValueError(f"tiers {list(tiers)} must rise from 0 or more")
        if compute_seconds is not None and len(tiers) != len(known):
            raise ValueError(f"each of the tiers {list(tiers)} must have its compute_seconds")
        if not link_rate > 0 or not all(seconds > 0 for seconds in known):
            raise ValueError("link_rate and compute_seconds must be above 0")
        self.tiers = tuple(tiers)
        self.compute = ComputeSeconds(dict(zip(tiers, known, strict=False)))
        self._link_rate = link_rate
        self.acceptance = Acceptance(tiers[-1])
        self.missed = MissedBytes()
        self.in_use = tiers[-1] if start is None else start
        if self.in_use not in tiers:
            raise ValueError(f"start {start} is none of the tiers {list(tiers)}")
        self.drafts = self.in_use
        """Of the next step; another than ``in_use`` in a trial."""
        self._credit = {tier: float("inf") for tier in tiers if tier != self.in_use}
        self._left = TRIAL_STEPS
        """Steps until the trial is over, or the tiers are compared."""

    def measured(self, drafts: int, missed_bytes: float, seconds: float | None = None) -> None:
        """A step with so many drafts has read ``missed_bytes`` over the link, and taken ``seconds``; None: it was not timed."""
        self.missed.observe(drafts, missed_bytes, drafts == self.in_use)
        if seconds is not None:
            self.compute.observe(drafts, seconds - missed_bytes / self._link_rate, drafts == self.in_use)

    def observe(self, accepted: Sequence[int], missed_bytes: float | None = None, drafts: int | None = None) -> None:
        """A step with ``drafts`` drafts of each request (default: those of ``drafts``), of which so many were ``accepted`` (the
        target's own token is not counted), has read ``missed_bytes`` over the link; None: ``measured`` says so."""
        drafts = self.drafts if drafts is None else drafts
        in_use = drafts == self.in_use
        self.acceptance.observe(drafts, accepted)
        if missed_bytes is not None:
            self.measured(drafts, missed_bytes)
        if in_use:
            earned = EXPLORE * self.seconds(self.in_use) / max(1, len(self.tiers) - 1)
            for tier in self._credit:
                self._credit[tier] += earned
        self._left -= drafts == self.drafts
        if self._left <= 0:
            self._compare()

    def rate(self, drafts: int) -> float:
        """Tokens a second that a step with so many drafts is expected to keep, of each request."""
        return self.acceptance.kept(drafts) / self.seconds(drafts)

    def seconds(self, drafts: int) -> float:
        return max(LEAST_SECONDS, self.compute.of(drafts) + self.missed.expected(drafts) / self._link_rate)

    def _compare(self) -> None:
        known = [tier for tier in self.tiers if tier in self.compute.known]
        if self.in_use not in known:  # or it would seem to take no time, and trials to cost none
            self.drafts, self._left = self.in_use, DECIDE_STEPS
            return
        trial = next((tier for tier, credit in self._credit.items() if credit >= self._price(tier)), None)
        tried_all = all(credit < float("inf") for credit in self._credit.values())
        best = max(known, key=self.rate)
        if tried_all and self.rate(best) > self.rate(self.in_use) * (1 + MARGIN):
            self._credit[self.in_use] = 0.0
            del self._credit[best]
            self.drafts = self.in_use = best
            self._left = DECIDE_STEPS
        elif trial is not None and self.drafts == self.in_use:
            self.drafts, self._left, self._credit[trial] = trial, TRIAL_STEPS, 0.0
        else:
            self.drafts, self._left = self.in_use, DECIDE_STEPS

    def _price(self, tier: int) -> float:
        """Seconds that a trial is expected to lose."""
        lost = max(LEAST_LOSS, 1 - self.rate(tier) / self.rate(self.in_use))
        return TRIAL_STEPS * self.seconds(tier) * lost

"""A run's history: bounded samples of the ledger's totals, and the hit rates that other residents would have reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from sglang_uvm_offload.routing.counts import ACTIVATIONS, Phase, RoutingCounts
from sglang_uvm_offload.units import Count, Listed, Seconds, Share

if TYPE_CHECKING:
    from sglang_uvm_offload.policy.extents import Extents
    from sglang_uvm_offload.residency.ledger import Ledger
    from sglang_uvm_offload.residency.model import ModelExperts

MAX_SAMPLES = 240
FIRST_INTERVAL_SECONDS = 1.0
CURVE_POINTS = 20

Totals = Annotated[list[Count], Listed]
Residents = Annotated[int, Meta(ge=0, le=1 << 15)]


class Past(Struct, frozen=True):
    """Samples of totals since the model was loaded. ``tokens`` counts all ranks together; the other columns are the ledger's,
    summed over all layers."""

    seconds: Annotated[list[Seconds], Meta(min_length=1), Listed]
    steps: Totals
    tokens: Totals
    routed: Totals
    routed_resident: Totals
    activations: Totals
    activations_resident: Totals
    zero_copy_bytes: Totals
    streamed_bytes: Totals
    filled_bytes: Totals
    moves: Totals
    moved_bytes: Totals

    def check(self) -> None:
        """Raise ``ValueError`` for columns that no server would report."""
        columns = [getattr(self, name) for name in self.__struct_fields__]
        if {len(column) for column in columns} != {len(self.seconds)}:
            raise ValueError("the columns must be equally long")
        if any(later < earlier for column in columns for earlier, later in pairwise(column)):
            raise ValueError("totals must not fall")

    def recent_growth(self, column: str) -> int:
        """The growth of a total over about the latter half of the time. If no sample falls on its start, an earlier one
        counts."""
        values = getattr(self, column)
        begin = int(np.searchsorted(self.seconds, self.seconds[-1] / 2, side="right")) - 1
        return values[-1] - values[begin]

    def rates(self, part: str, whole: str) -> list[tuple[float, float | None]]:
        """Points ``(seconds, growth of part / growth of whole)``, constant between samples. None where whole did not grow."""
        points: list[tuple[float, float | None]] = []
        samples = zip(self.seconds, getattr(self, part), getattr(self, whole), strict=True)
        for (begin, part_before, before), (end, part_after, after) in pairwise(samples):
            rate = (part_after - part_before) / (after - before) if after > before else None
            points += [(begin, rate), (end, rate)]
        return points


class History:
    """Keeps at most ``MAX_SAMPLES`` samples of a ledger since its start. When full, it drops every second sample and doubles
    the interval. Samples are totals, so only resolution is lost."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]):
        self._ledger = ledger
        self._clock = clock
        self._interval = FIRST_INTERVAL_SECONDS
        self._started = clock()
        self._samples = [self._now(0)]

    def add(self, tokens: int) -> None:
        """Sample the ledger if the last sample is an interval old. Call after updating it. ``tokens`` is the total so far."""
        if self._clock() - self._started < self._samples[-1]["seconds"] + self._interval:
            return
        if len(self._samples) >= MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._interval *= 2
        self._samples.append(self._now(tokens))

    def past(self, tokens: int) -> Past:
        """All samples, followed by the current totals."""
        samples = [*self._samples, self._now(tokens)]
        return Past(**{name: [sample[name] for sample in samples] for name in Past.__struct_fields__})

    def _now(self, tokens: int) -> dict[str, Any]:
        seconds, ledger = round(self._clock() - self._started, 3), self._ledger
        totals = {name: round(np.sum(getattr(ledger, name)).item()) for name in Past.__struct_fields__[3:]}
        return {"seconds": seconds, "steps": ledger.steps, "tokens": tokens, **totals}


class ProfileVerdict(Struct, frozen=True):
    """How well a profile served the first ``tokens`` live tokens: the hit rate of its residents, that of the best residents for
    these tokens, and whether its residents were kept."""

    hit_rate: Share
    best: Share
    tokens: Count
    kept: bool


class Curve(Struct, frozen=True):
    """The hit rates that fixed residents would have reached over ``activations``, which counts decode activations of experts
    that can be offloaded. For each n in ``residents``: ``uniform`` has the best n experts of each layer resident, ``pooled``
    the best set of the same total size over all layers. ``present`` is the hit rate of the current residents. The best
    residents are chosen from the same activations that they are measured on, so their hit rates are upper bounds.
    """

    decode_steps: Count
    activations: Annotated[int, Meta(ge=1, le=1 << 60)]
    present: Share
    residents: Annotated[list[Residents], Meta(min_length=2), Listed]
    uniform: Annotated[list[Share], Listed]
    pooled: Annotated[list[Share], Listed] = msgspec.field(name="global")

    def check(self) -> None:
        """Raise ``ValueError`` if the points do not form a curve."""
        if not len(self.residents) == len(self.uniform) == len(self.pooled):
            raise ValueError("residents, uniform and global must be equally long")
        if any(later <= earlier for earlier, later in pairwise(self.residents)):
            raise ValueError("residents must rise")

    def at(self, residents: float, pooled: bool) -> float:
        """The best hit rate with ``residents`` residents per layer, interpolated linearly."""
        return float(np.interp(residents, self.residents, self.pooled if pooled else self.uniform))


def combined(curves: Sequence[Curve]) -> Curve | None:
    """The mean of several ranks' curves, weighted by activations. n is per rank. None without curves."""
    if not curves:
        return None
    total = sum(curve.activations for curve in curves)
    grid = sorted({n for curve in curves for n in curve.residents})

    def mean(pooled: bool) -> list[float]:
        return [min(1.0, sum(curve.activations / total * curve.at(n, pooled) for curve in curves)) for n in grid]

    return Curve(
        decode_steps=max(curve.decode_steps for curve in curves),
        activations=total,
        present=min(1.0, sum(curve.activations / total * curve.present for curve in curves)),
        residents=grid,
        uniform=mean(False),
        pooled=mean(True),
    )


def hit_rate_curve(seen: RoutingCounts, model: ModelExperts) -> Curve | None:
    """The hit rates for the decode activations in ``seen``, at about ``CURVE_POINTS`` budgets from no residents to all, and at
    the current budget. None without activations.

    Leaves out always-resident experts and layers without managed tensors, because no budget changes their cost.
    """
    candidates, extents, movable = model.candidates(), model.extents, model.movable()
    activations = seen.counts[:, Phase.DECODE, ACTIVATIONS] * candidates
    total = int(activations.sum())
    if total == 0:
        return None
    expert_bytes = np.maximum(model.expert_bytes, 1)
    resident = model.resident_extents()
    placed = candidates.any(axis=1)
    now = (extents.bytes_by_layer(resident & movable) / expert_bytes)[placed].mean()
    most = int(candidates.sum(axis=1).max())
    residents = np.unique(np.rint([*np.linspace(0, most, CURVE_POINTS + 1), min(now, most)]).astype(np.int64))
    served = _served(extents, activations / expert_bytes[:, None])
    order = np.flatnonzero(movable)
    order = order[np.argsort(-extents.density(activations)[order], kind="stable")]
    capacity = np.array([[sum(it.budget(int(n)) for it in layer.layouts) for n in residents] for layer in model.layers])
    always = served[~movable].sum()
    of_layer = [order[extents.layer[order] == index] for index in range(len(capacity))]
    uniform = np.sum([_best(served, extents.nbytes, *pair) for pair in zip(of_layer, capacity, strict=True)], axis=0)
    return Curve(
        decode_steps=seen.steps[1],
        activations=total,
        present=_share(served[resident].sum(), total),
        residents=residents.tolist(),
        uniform=[_share(hits + always, total) for hits in uniform],
        pooled=[_share(hits + always, total) for hits in _best(served, extents.nbytes, order, capacity.sum(axis=0))],
    )


def _served(extents: Extents, activations_per_byte: np.ndarray) -> np.ndarray:
    """float64 ``[extents]``: the activations that each extent serves."""
    weights = activations_per_byte.ravel()[extents.part_expert] * extents.part_bytes
    return np.bincount(extents.part_extent, weights, minlength=len(extents))


def _best(served: np.ndarray, nbytes: np.ndarray, order: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """``[budgets]``: the activations served by the first extents of ``order`` that fit in each budget (bytes)."""
    hits = np.concatenate([[0.0], served[order].cumsum()])
    return hits[np.searchsorted(nbytes[order].cumsum(), budgets, side="right")]


def _share(part: float, total: int) -> float:
    return min(1.0, float(part) / total)

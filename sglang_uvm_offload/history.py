"""The past of a run: a bounded series of the ledger's totals, and what other budgets would have covered of its routing.

``Past`` and ``Curve`` are what ``/server_info`` shows and what a report reads back, so their fields carry the bounds that hold
for data from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from sglang_uvm_offload.expert_layer import ExpertLayer
from sglang_uvm_offload.ledger import Ledger, stack
from sglang_uvm_offload.routing import TOUCHES, Phase, RoutingCounts

MAX_SAMPLES = 240
FIRST_INTERVAL_SECONDS = 1.0
CURVE_POINTS = 20

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
Residents = Annotated[int, Meta(ge=0, le=1 << 15)]


class Past(Struct, frozen=True):
    """Totals since the model was loaded, from the first sample to the last: ``tokens`` of all ranks together, the others as in
    the ledger, over all layers."""

    seconds: Annotated[list[Seconds], Meta(min_length=1)]
    steps: list[Count]
    tokens: list[Count]
    routed: list[Count]
    routed_resident: list[Count]
    touches: list[Count]
    touches_resident: list[Count]
    read_through_bytes: list[Count]
    moves: list[Count]
    moved_bytes: list[Count]

    def __post_init__(self) -> None:
        columns = [getattr(self, name) for name in self.__struct_fields__]
        if {len(column) for column in columns} != {len(self.seconds)}:
            raise ValueError("the columns must be equally long")
        if any(later < earlier for column in columns for earlier, later in pairwise(column)):
            raise ValueError("totals must not fall")

    def of_late(self, column: str) -> int:
        """What the latest half of the time added to a total, or more where it was not sampled at its beginning."""
        values = getattr(self, column)
        begin = int(np.searchsorted(self.seconds, self.seconds[-1] / 2, side="right")) - 1
        return values[-1] - values[begin]

    def rates(self, part: str, whole: str) -> list[tuple[float, float | None]]:
        """``(seconds, what part gained for each of whole)``, flat from sample to sample; None where whole gained nothing."""
        points: list[tuple[float, float | None]] = []
        rows = zip(self.seconds, getattr(self, part), getattr(self, whole), strict=True)
        for (begin, part_before, before), (end, part_after, after) in pairwise(rows):
            rate = (part_after - part_before) / (after - before) if after > before else None
            points += [(begin, rate), (end, rate)]
        return points


class Curve(Struct, frozen=True):
    """What share of ``touches`` (uses by decode steps of the experts that can be offloaded) the best fixed residents would have
    served: n of each layer (``uniform``), or as many bytes of all layers together (``pooled``), for n in ``residents``; and
    what share the ``present`` ones would have. The best are chosen from the touches that they are measured on: upper bounds.
    """

    decode_steps: Count
    touches: Annotated[int, Meta(ge=1, le=1 << 60)]
    present: Share
    residents: Annotated[list[Residents], Meta(min_length=2)]
    uniform: list[Share]
    pooled: list[Share] = msgspec.field(name="global")

    def __post_init__(self) -> None:
        if not len(self.residents) == len(self.uniform) == len(self.pooled):
            raise ValueError("residents, uniform and global must be equally long")
        if any(later <= earlier for earlier, later in pairwise(self.residents)):
            raise ValueError("residents must rise")

    def at(self, residents: float, pooled: bool) -> float:
        """The best share at so many residents a layer, between points by a straight line."""
        return float(np.interp(residents, self.residents, self.pooled if pooled else self.uniform))


class History:
    """Samples of a ledger from its start to now, at most ``max_samples`` however long that is: when there are so many, every
    second one goes, and the interval doubles. Samples are totals, so that this loses resolution and no bytes."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], max_samples: int = MAX_SAMPLES):
        self._ledger = ledger
        self._clock = clock
        self._max_samples = max_samples
        self._interval = FIRST_INTERVAL_SECONDS
        self._started = clock()
        self._samples = [self._now(0)]

    def add(self, tokens: int) -> None:
        """Sample the ledger, just brought up to date, if the last sample is an interval ago; ``tokens`` are all so far."""
        if self._clock() - self._started < self._samples[-1]["seconds"] + self._interval:
            return
        if len(self._samples) >= self._max_samples:
            self._samples = self._samples[::2]
            self._interval *= 2
        self._samples.append(self._now(tokens))

    def past(self, tokens: int) -> dict[str, list[Any]]:
        """All samples and, as the last one, the totals of now: the columns of a ``Past``, which is checked where it is read, so
        that no statistic can end a server."""
        samples = [*self._samples, self._now(tokens)]
        return {name: [sample[name] for sample in samples] for name in Past.__struct_fields__}

    def _now(self, tokens: int) -> dict[str, Any]:
        ledger = self._ledger
        return {
            "seconds": round(self._clock() - self._started, 3),
            "steps": ledger.steps,
            "tokens": tokens,
            "routed": int(ledger.routed.sum()),
            "routed_resident": int(ledger.routed_resident.sum()),
            "touches": int(ledger.touches.sum()),
            "touches_resident": int(ledger.touches_resident.sum()),
            "read_through_bytes": int(ledger.read_through_bytes.sum()),
            "moves": ledger.moves,
            "moved_bytes": ledger.moved_bytes,
        }


def coverage_curve(seen: RoutingCounts, layers: Sequence[ExpertLayer]) -> Curve | None:
    """The curve for the decode touches in ``seen``, at about ``CURVE_POINTS`` budgets from none to all and at that of now; None
    without any.

    Pinned experts and layers without managed tensors are left out: no budget changes what they cost.
    """
    width = seen.counts.shape[-1]
    routed = stack([~layer.pinned if layer.tensors else layer.pinned[:0] for layer in layers], width)
    touches = seen.counts[:, Phase.DECODE, TOUCHES] * routed
    total = int(touches.sum())
    if total == 0:
        return None
    most = int(routed.sum(axis=1).max())
    resident = stack([layer.resident for layer in layers], width)
    now = (resident & routed).sum() / routed.any(axis=1).sum()
    residents = np.unique(np.rint([*np.linspace(0, most, CURVE_POINTS + 1), now]).astype(np.int64))
    expert_bytes = np.array([layer.expert_bytes for layer in layers], dtype=np.int64)
    return Curve(
        decode_steps=seen.steps[1],
        touches=total,
        present=int(touches[resident].sum()) / total,
        residents=residents.tolist(),
        uniform=(_best_of_each_layer(touches)[residents] / total).tolist(),
        pooled=(_best_of_all(touches, routed, expert_bytes, residents) / total).tolist(),
    )


def _best_of_each_layer(touches: np.ndarray) -> np.ndarray:
    """``int64[width + 1]``: the touches of the n most used experts of each layer."""
    falling = -np.sort(-touches, axis=1)
    return np.concatenate([[0], falling.sum(axis=0).cumsum()])


def _best_of_all(touches: np.ndarray, routed: np.ndarray, expert_bytes: np.ndarray, residents: np.ndarray) -> np.ndarray:
    """``int64[len(residents)]``: the touches of the most used experts that fit in the bytes of n experts of each layer. A touch
    costs as many bytes as its expert takes, so that the ranking is by touches alone."""
    of_expert = np.broadcast_to(expert_bytes[:, None], touches.shape)[routed]
    order = np.argsort(-touches[routed], kind="stable")
    taken = of_expert[order].cumsum()
    covered = np.concatenate([[0], touches[routed][order].cumsum()])
    budgets = (np.minimum(residents[:, None], routed.sum(axis=1)) * expert_bytes).sum(axis=1)
    return covered[np.searchsorted(taken, budgets, side="right")]


def combined(curves: Sequence[Curve]) -> Curve | None:
    """The curves of several ranks as one, each weighing as much as it was touched; n counts on each rank. None for no curve."""
    if not curves:
        return None
    total = sum(curve.touches for curve in curves)
    grid = sorted({n for curve in curves for n in curve.residents})

    def mean(pooled: bool) -> list[float]:
        return [min(1.0, sum(curve.touches / total * curve.at(n, pooled) for curve in curves)) for n in grid]

    return Curve(
        decode_steps=max(curve.decode_steps for curve in curves),
        touches=total,
        present=min(1.0, sum(curve.touches / total * curve.present for curve in curves)),
        residents=grid,
        uniform=mean(False),
        pooled=mean(True),
    )

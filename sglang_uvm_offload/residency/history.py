"""The history of a run: a bounded series of the ledger's totals, and the hit rate that other budgets would have had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.residency.curve import Curve
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.status import Past
from sglang_uvm_offload.routing.counts import ACTIVATIONS, Phase, RoutingCounts

MAX_SAMPLES = 240
FIRST_INTERVAL_SECONDS = 1.0
CURVE_POINTS = 20


class History:
    """At most ``max_samples`` samples of a ledger since its start. When they are full, every second one is dropped and the
    interval doubles. Samples are totals, so only resolution is lost."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], max_samples: int = MAX_SAMPLES):
        self._ledger = ledger
        self._clock = clock
        self._max_samples = max_samples
        self._interval = FIRST_INTERVAL_SECONDS
        self._started = clock()
        self._samples = [self._now(0)]

    def add(self, tokens: int) -> None:
        """Sample the ledger if the last sample is an interval old. Update the ledger first; ``tokens`` is the total so far."""
        if self._clock() - self._started < self._samples[-1]["seconds"] + self._interval:
            return
        if len(self._samples) >= self._max_samples:
            self._samples = self._samples[::2]
            self._interval *= 2
        self._samples.append(self._now(tokens))

    def past(self, tokens: int) -> Past:
        """All samples, with the current totals as the last one."""
        samples = [*self._samples, self._now(tokens)]
        return Past(**{name: [sample[name] for sample in samples] for name in Past.__struct_fields__})

    def _now(self, tokens: int) -> dict[str, Any]:
        ledger = self._ledger
        return {
            "seconds": round(self._clock() - self._started, 3),
            "steps": ledger.steps,
            "tokens": tokens,
            "routed": int(ledger.routed.sum()),
            "routed_resident": round(ledger.routed_resident.sum()),
            "activations": int(ledger.activations.sum()),
            "activations_resident": round(ledger.activations_resident.sum()),
            "zero_copy_bytes": int(ledger.zero_copy_bytes.sum()),
            "streamed_bytes": int(ledger.streamed_bytes.sum()),
            "filled_bytes": int(ledger.filled_bytes.sum()),
            "moves": ledger.moves,
            "moved_bytes": ledger.moved_bytes,
        }


def hit_rate_curve(seen: RoutingCounts, model: ModelExperts) -> Curve | None:
    """The hit rate of the decode activations in ``seen``, at about ``CURVE_POINTS`` budgets from none to all and at the current
    one; None without activations.

    Always-resident experts and layers without managed tensors are left out: no budget changes their cost.
    """
    candidates, extents, movable = model.candidates(), model.extents, model.movable()
    activations = seen.counts[:, Phase.DECODE, ACTIVATIONS] * candidates
    total = int(activations.sum())
    if total == 0:
        return None
    expert_bytes = np.array([max(layer.expert_bytes, 1) for layer in model.layers], dtype=np.int64)
    resident = model.resident_extents()
    placed = candidates.any(axis=1)
    now = (extents.bytes_by_layer(resident & movable) / expert_bytes)[placed].mean()
    most = int(candidates.sum(axis=1).max())
    residents = np.unique(np.rint([*np.linspace(0, most, CURVE_POINTS + 1), min(now, most)]).astype(np.int64))
    served = _served(extents, activations / expert_bytes[:, None])
    order = np.flatnonzero(movable)
    order = order[np.argsort(-extents.density(activations)[order], kind="stable")]
    capacity = np.array([[_movable_budget(la, int(n)) for n in residents] for la in model.layers])
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


def _movable_budget(layer: ExpertLayer, num_resident: int) -> int:
    """VRAM that the movable extents of this many residents take."""
    return sum(layout.budget(num_resident) - layout.edge_bytes for layout in layer.layouts)


def _served(extents: Extents, activations_per_byte: np.ndarray) -> np.ndarray:
    """float64 ``[extents]``: the activations that each serves."""
    weights = activations_per_byte.ravel()[extents.part_expert] * extents.part_bytes
    return np.bincount(extents.part_extent, weights, minlength=len(extents))


def _best(served: np.ndarray, nbytes: np.ndarray, order: np.ndarray, budgets: np.ndarray) -> np.ndarray:
    """``[budgets]``: the activations that the first extents of ``order`` serve, as many as fit in each number of bytes."""
    hits = np.concatenate([[0.0], served[order].cumsum()])
    return hits[np.searchsorted(nbytes[order].cumsum(), budgets, side="right")]


def _share(part: float, total: int) -> float:
    return min(1.0, float(part) / total)

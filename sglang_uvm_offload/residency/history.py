"""The history of a run: a bounded series of the ledger's totals, and the hit rate that other budgets would have had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.residency.ledger import Ledger, stack
from sglang_uvm_offload.residency.status import Curve, Past
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
            "routed_resident": int(ledger.routed_resident.sum()),
            "activations": int(ledger.activations.sum()),
            "activations_resident": int(ledger.activations_resident.sum()),
            "zero_copy_bytes": int(ledger.zero_copy_bytes.sum()),
            "moves": ledger.moves,
            "moved_bytes": ledger.moved_bytes,
        }


def hit_rate_curve(seen: RoutingCounts, layers: Sequence[ExpertLayer]) -> Curve | None:
    """The hit rate of the decode activations in ``seen``, at about ``CURVE_POINTS`` budgets from none to all and at the current
    one; None without activations.

    Always-resident experts and layers without managed tensors are left out: no budget changes their cost.
    """
    width = seen.counts.shape[-1]
    routed = stack([~layer.always_resident if layer.tensors else layer.always_resident[:0] for layer in layers], width)
    activations = seen.counts[:, Phase.DECODE, ACTIVATIONS] * routed
    total = int(activations.sum())
    if total == 0:
        return None
    most = int(routed.sum(axis=1).max())
    resident = stack([layer.resident for layer in layers], width)
    now = (resident & routed).sum() / routed.any(axis=1).sum()
    residents = np.unique(np.rint([*np.linspace(0, most, CURVE_POINTS + 1), now]).astype(np.int64))
    expert_bytes = np.array([layer.expert_bytes for layer in layers], dtype=np.int64)
    return Curve(
        decode_steps=seen.steps[1],
        activations=total,
        present=int(activations[resident].sum()) / total,
        residents=residents.tolist(),
        uniform=(_best_of_each_layer(activations)[residents] / total).tolist(),
        pooled=(_best_of_all(activations, routed, expert_bytes, residents) / total).tolist(),
    )


def _best_of_each_layer(activations: np.ndarray) -> np.ndarray:
    """``int64[width + 1]``: the activations of the n most used experts of each layer."""
    falling = -np.sort(-activations, axis=1)
    return np.concatenate([[0], falling.sum(axis=0).cumsum()])


def _best_of_all(activations: np.ndarray, routed: np.ndarray, expert_bytes: np.ndarray, residents: np.ndarray) -> np.ndarray:
    """``int64[len(residents)]``: the activations of the most used experts that fit in the bytes of n experts of each layer. An
    activation saves as many bytes as its expert takes, so the ranking is by activations alone."""
    of_expert = np.broadcast_to(expert_bytes[:, None], activations.shape)[routed]
    order = np.argsort(-activations[routed], kind="stable")
    taken = of_expert[order].cumsum()
    hits = np.concatenate([[0], activations[routed][order].cumsum()])
    budgets = (np.minimum(residents[:, None], routed.sum(axis=1)) * expert_bytes).sum(axis=1)
    return hits[np.searchsorted(taken, budgets, side="right")]

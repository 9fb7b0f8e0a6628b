"""Scores experts by their counts, and chooses each layer's best extents or experts. Pure.

Arrays are ``[layers, experts]`` unless stated.
"""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.policy.forecast import PREFILL_PRIOR_STEPS, spread


def score(decode_activations: np.ndarray, decode_steps: float, prefill_routed: np.ndarray) -> np.ndarray:
    """Each expert's expected activations per decode step, float64.

    ``decode_activations`` counts the decode steps, out of ``decode_steps``, that read the expert. ``prefill_routed`` counts the
    prefill tokens routed to it. The score mixes the decode rate with a prior that weighs ``PREFILL_PRIOR_STEPS`` steps: the
    layer's activations per step, spread over its experts by their share of the prefill tokens. Without decode steps, the
    prefill tokens alone rank the experts; with many, the prior vanishes.
    """
    activations = np.asarray(decode_activations, dtype=np.float64)
    routed = np.asarray(prefill_routed, dtype=np.float64)
    tokens = routed.sum(axis=1, keepdims=True)
    per_step = activations.sum(axis=1, keepdims=True) / decode_steps if decode_steps else np.ones_like(tokens)
    strength = np.where(tokens > 0, PREFILL_PRIOR_STEPS, 0.0)
    return (activations + strength * spread(per_step, routed)) / np.maximum(decode_steps + strength, 1.0)


def best(
    extents: Extents, density: np.ndarray, capacity: np.ndarray, resident: np.ndarray, candidate: np.ndarray
) -> np.ndarray:
    """``bool[extents]``: each layer's candidates with the largest density that fit its ``capacity`` (in bytes, int64
    ``[layers]``), then smaller ones that still fit. Ties prefer residents, so that equal densities move nothing, and then the
    lower expert, so that experts are resident as a whole. Raises ``ValueError`` if shapes differ or a density is NaN."""
    if not density.shape == resident.shape == candidate.shape == extents.layer.shape or capacity.shape != extents.shape[:1]:
        raise ValueError(
            f"density {density.shape}, resident {resident.shape}, candidate {candidate.shape} and capacity {capacity.shape} "
            f"do not match {len(extents)} extents of {extents.shape[0]} layers"
        )
    if np.isnan(density).any():
        raise ValueError("a density is not a number")
    order = np.lexsort((extents.first_expert, ~resident, -density, extents.layer))
    order, left = order[candidate[order]], capacity.copy()
    chosen = np.zeros(len(extents), dtype=bool)
    while (order := order[extents.nbytes[order] <= left[extents.layer[order]]]).size:
        fits = _running_bytes(extents, order) <= left[extents.layer[order]]
        chosen[order[fits]] = True
        left = capacity - extents.bytes_by_layer(chosen)
        order = order[~fits]
    return chosen


def _running_bytes(extents: Extents, order: np.ndarray) -> np.ndarray:
    """The bytes of each extent in ``order`` (sorted by layer), plus the bytes of those before it in its layer."""
    layer, total = extents.layer[order], np.cumsum(extents.nbytes[order])
    before = np.concatenate([[0], total])[np.searchsorted(layer, np.arange(extents.shape[0]))]
    return total - before[layer]


def top(key: np.ndarray, capacity: np.ndarray, resident: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """``bool[layers, experts]``: each layer's ``capacity[layer]`` candidates with the largest key. Ties prefer residents, then
    lower ids."""
    order = np.lexsort((~resident, -key, ~candidate), axis=-1)
    chosen = np.zeros(key.shape, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(key.shape[1]) < capacity[:, None], axis=1)
    return chosen & candidate


def within_floor(extents: Extents, key: np.ndarray, floor: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """``bool[extents]``: each layer's candidates with the largest key, until they take its ``floor`` (bytes, int64
    ``[layers]``). Ties prefer the lower offset."""
    order = np.lexsort((-key, extents.layer))
    order = order[candidate[order]]
    needed = _running_bytes(extents, order) - extents.nbytes[order] < floor[extents.layer[order]]
    inside = np.zeros(len(extents), dtype=bool)
    inside[order[needed]] = True
    return inside

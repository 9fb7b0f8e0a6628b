"""Scoring experts by their counts, and selecting the best of each layer. Pure.

Arrays are ``[layers, experts]`` unless stated.
"""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy.forecast import PREFILL_PRIOR_STEPS, spread


def score(decode_activations: np.ndarray, decode_steps: float, prefill_routed: np.ndarray) -> np.ndarray:
    """Expected activations of each expert per decode step, float64.

    ``decode_activations`` counts the decode steps, of ``decode_steps``, that used the expert; ``prefill_routed`` counts the
    prefill tokens routed to it. The decode rate is mixed with a prior that weighs ``PREFILL_PRIOR_STEPS`` steps: a layer's
    activations per step, spread over its experts by their share of the prefill tokens. Without decode steps the ranking is
    that of the prefill tokens; with many, the prior vanishes.
    """
    activations = np.asarray(decode_activations, dtype=np.float64)
    routed = np.asarray(prefill_routed, dtype=np.float64)
    tokens = routed.sum(axis=1, keepdims=True)
    per_step = activations.sum(axis=1, keepdims=True) / decode_steps if decode_steps else np.ones_like(tokens)
    strength = np.where(tokens > 0, PREFILL_PRIOR_STEPS, 0.0)
    return (activations + strength * spread(per_step, routed)) / np.maximum(decode_steps + strength, 1.0)


def select(scores: np.ndarray, capacity: np.ndarray, resident: np.ndarray, always_resident: np.ndarray) -> np.ndarray:
    """``bool``: the ``capacity[layer]`` experts of each layer with the highest scores, and all ``always_resident`` ones.

    Always-resident experts (fused shared experts) do not count against the capacity. Ties keep the current resident, then
    prefer the lower id, so equal scores move nothing. A negative score marks an empty slot (layers of different sizes share
    one array), which is never chosen. Raises ``ValueError`` for arguments whose shapes differ, or a score that is NaN.
    """
    if not scores.shape == resident.shape == always_resident.shape or capacity.shape != scores.shape[:1]:
        raise ValueError(
            f"scores {scores.shape}, resident {resident.shape}, always_resident {always_resident.shape} and capacity "
            f"{capacity.shape} do not match"
        )
    if np.isnan(scores).any():
        raise ValueError("a score is not a number")
    return top(scores, capacity, resident, ~always_resident & (scores >= 0)) | always_resident


def top(key: np.ndarray, capacity: np.ndarray, resident: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """``bool``: the ``capacity[layer]`` candidates of each layer with the largest key. Ties prefer residents, then lower
    ids."""
    order = np.lexsort((~resident, -key, ~candidate), axis=-1)
    chosen = np.zeros(key.shape, dtype=bool)
    np.put_along_axis(chosen, order, np.arange(key.shape[1]) < capacity[:, None], axis=1)
    return chosen & candidate


def rank(key: np.ndarray) -> np.ndarray:
    """Each expert's rank in its layer: 0 for the largest key; ties prefer the lower id."""
    order = np.argsort(-key, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(key.shape[1]), key.shape), axis=1)
    return rank

"""Which experts should be resident. Pure: arrays and state in, a plan out; no clock, no device, no log.

Arrays are ``[layers, experts]`` unless stated. A slot that is no expert (layers of different sizes share one array) has a
negative score. Every rank that sees the same counts decides alike: nothing here depends on anything but the arguments.
"""

from __future__ import annotations

import numpy as np

PREFILL_PRIOR_STEPS = 32.0
"""How many decode steps the routing of prefill tokens is worth, however many prefill tokens there were."""


def score(decode_touches: np.ndarray, decode_steps: float, prefill_routed: np.ndarray) -> np.ndarray:
    """Expected touches of each expert per decode step, float64.

    ``decode_touches`` counts the decode steps, of ``decode_steps``, that used the expert; ``prefill_routed`` the prefill
    tokens routed to it. The rate seen in decode is mixed with a prior worth ``PREFILL_PRIOR_STEPS`` steps: a layer's touches
    per step, spread over its experts by their share of the prefill tokens. Without decode steps the ranking is that of the
    prefill tokens; with many the prior vanishes.
    """
    touches = np.asarray(decode_touches, dtype=np.float64)
    routed = np.asarray(prefill_routed, dtype=np.float64)
    tokens = routed.sum(axis=1, keepdims=True)
    per_step = touches.sum(axis=1, keepdims=True) / decode_steps if decode_steps else np.ones_like(tokens)
    # A step's tokens on an expert taken as Poisson: the chance that there is any.
    prior = -np.expm1(-per_step * routed / np.maximum(tokens, 1.0))
    strength = np.where(tokens > 0, PREFILL_PRIOR_STEPS, 0.0)
    return (touches + strength * prior) / np.maximum(decode_steps + strength, 1.0)


def select(scores: np.ndarray, capacity: np.ndarray, resident: np.ndarray, pinned: np.ndarray) -> np.ndarray:
    """``bool``: the ``capacity[layer]`` experts of each layer with the highest scores, and all ``pinned`` ones.

    Pinned experts (fused shared experts) do not count against the capacity. Among equal scores a current resident stays,
    then the lower id comes first, so equal scores move nothing. Slots with a negative score are never chosen. Raises
    ``ValueError`` for arguments whose shapes differ, or a score that is not a number.
    """
    if not scores.shape == resident.shape == pinned.shape or capacity.shape != scores.shape[:1]:
        raise ValueError(
            f"scores {scores.shape}, resident {resident.shape}, pinned {pinned.shape} and capacity {capacity.shape} "
            "do not fit together"
        )
    if np.isnan(scores).any():
        raise ValueError("a score is not a number")
    candidate = ~pinned & (scores >= 0)
    ids = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    order = np.lexsort((ids, ~resident, -scores, ~candidate), axis=-1)
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, ids < capacity[:, None], axis=1)
    return (chosen & candidate) | pinned

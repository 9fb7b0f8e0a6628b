"""How many experts a rank keeps resident, which extents by their experts' counts, and the hit rate of a resident set."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts


def rank_share(num_resident: int, ep_rank: int, ep_size: int) -> int:
    """How many of a layer's N residents expert-parallel rank ``ep_rank`` keeps: N split as evenly as possible."""
    return num_resident * (ep_rank + 1) // ep_size - num_resident * ep_rank // ep_size


def hottest(
    seen: RoutingCounts, extents: Extents, capacity: np.ndarray, resident: np.ndarray, movable: np.ndarray
) -> np.ndarray:
    """``bool[extents]``: the movable ones that should serve the most activations, ``capacity`` bytes (int64 ``[layers]``) in
    each layer. Ties prefer the ``resident`` ones."""
    scores = ranking.score(seen.counts[:, Phase.DECODE, ACTIVATIONS], seen.steps[1], seen.counts[:, Phase.PREFILL, ROUTED])
    return ranking.best(extents, extents.density(scores), capacity, resident, movable)


def best_residents(model: ModelExperts, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
    """``bool[extents]``: those that should serve the most activations, in each layer as many bytes as ``resident`` takes."""
    extents, movable = model.extents, model.movable()
    capacity = extents.bytes_by_layer(resident & movable)
    return hottest(seen, extents, capacity, resident, movable) | (resident & ~movable)


def hit_rate(routed: np.ndarray, share: np.ndarray) -> float:
    """The share of routed tokens that VRAM served, where ``share`` of each expert is there (both ``[layers, experts]``); 0
    where nothing was routed."""
    total = routed.sum()
    return float((routed * share).sum() / total) if total else 0.0

"""How many experts a rank keeps resident, which ones by their counts, and the hit rate of a resident set."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts


def rank_share(num_resident: int, ep_rank: int, ep_size: int) -> int:
    """How many of a layer's N residents expert-parallel rank ``ep_rank`` keeps: N split as evenly as possible."""
    return num_resident * (ep_rank + 1) // ep_size - num_resident * ep_rank // ep_size


def hottest(seen: RoutingCounts, resident: np.ndarray, always_resident: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``bool[layers, experts]``: the experts with the most expected activations, as many in each layer as now. Experts in
    ``always_resident`` stay; only ``slots`` hold an expert."""
    scores = ranking.score(seen.counts[:, Phase.DECODE, ACTIVATIONS], seen.steps[1], seen.counts[:, Phase.PREFILL, ROUTED])
    return ranking.select(np.where(slots, scores, -1.0), (resident & ~always_resident).sum(axis=1), resident, always_resident)


def hit_rate(routed: np.ndarray, resident: np.ndarray) -> float:
    """The share of routed tokens (``[layers, experts]``) that residents served, 0 where nothing was routed."""
    total = routed.sum()
    return float((routed * resident).sum() / total) if total else 0.0

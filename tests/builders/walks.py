"""Measures of the locality of a trace's routing."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.routing.trace import Trace


def hit_rate(trace: Trace) -> np.ndarray:
    """Returns, for n = 0..experts, the share of activations on a layer's n most used experts, averaged over layers."""
    layers = [np.bincount(ids.ravel(), minlength=trace.num_experts) for ids in trace.ids.swapaxes(0, 1)]
    ordered = -np.sort(-np.stack(layers), axis=1) / trace.ids[:, 0].size
    return np.concatenate([[0.0], ordered.cumsum(axis=1).mean(axis=0)])


def overlap(trace: Trace, lag: int) -> float:
    """Returns the share of a token's experts that the token ``lag`` earlier in its request used too, averaged over tokens and
    layers."""
    request = np.repeat(np.arange(trace.num_requests), trace.seq_len)
    later = lag + np.flatnonzero(request[lag:] == request[:-lag])
    now, then = trace.ids[later], trace.ids[later - lag]
    return float((now[..., :, None] == then[..., None, :]).any(-1).mean()) if later.size else float("nan")


def lift(trace: Trace, lag: int) -> float:
    """Returns ``overlap`` over its value by chance."""
    return overlap(trace, lag) * trace.num_experts / trace.ids.shape[2]

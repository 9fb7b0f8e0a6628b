"""Measured routing for the layers that are timed.

``routing_trace.npz`` is a trace (``sglang_uvm_offload.routing.trace``) of the first decode steps of 32 requests to gpt-oss-20b
(24 layers, 32 experts, 4 a token), cut from AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting at 72b368f6 (Apache-2.0, see
README.md). ``routing_overlay.py`` lays it over models with more experts.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.gpu.shapes import MoeShape
from benchmarks.routing_overlay import lay_over
from sglang_uvm_offload.routing.trace import Trace

FIXTURE = Path(__file__).with_name("routing_trace.npz")


@cache
def trace() -> Trace:
    return Trace.load(FIXTURE)


@cache
def load() -> np.ndarray:
    """``ids[step, request, layer, k]``; all its requests are equally long."""
    measured = trace()
    steps = measured.steps(range(measured.num_requests), measured.num_requests)
    if steps.min() < 0:
        raise ValueError(f"{FIXTURE} holds requests of different lengths")
    return measured.ids[steps]


def for_shape(shape: MoeShape) -> np.ndarray:
    """``ids[step, request, layer, top_k]`` for the shape's layers and experts (int32)."""
    return lay_over(load(), trace().num_experts, shape.layers, shape.experts, shape.top_k)


def hottest(ids: np.ndarray, experts: int, share: float) -> np.ndarray:
    """``bool[layer, expert]``: that share of each layer's experts, those picked most often in ``ids[..., layer, k]``."""
    layers = ids.shape[-2]
    chosen = np.zeros((layers, experts), dtype=bool)
    for layer in range(layers):
        counts = np.bincount(ids[..., layer, :].ravel(), minlength=experts)
        chosen[layer, np.argsort(-counts, kind="stable")[: round(share * experts)]] = True
    return chosen

"""Measured routing, laid over a model's experts.

``routing_trace.npz`` holds the first decode steps of 32 requests to gpt-oss-20b (24 layers, 32 experts, 4 a token), cut from
AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting at 72b368f6 (Apache-2.0, see README.md). A model with more experts gets
them in groups of 32, each of which follows one measured layer; from each group it takes as many of the 4 recorded experts as
make its top-k. So skew, locality from step to step and correlation between requests are measured; that the groups are
chosen from independently is an assumption.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from shapes import MoeShape

FIXTURE = Path(__file__).resolve().parent / "routing_trace.npz"


@cache
def load() -> np.ndarray:
    """``ids[step, request, layer, k]``."""
    with np.load(FIXTURE, allow_pickle=False) as file:
        ids, experts = file["ids"], int(file["num_experts"])
    if ids.ndim != 4 or ids.dtype != np.uint8 or ids.max() >= experts:
        raise ValueError(f"{FIXTURE} holds no routing: {ids.dtype} {ids.shape}, largest id {ids.max()} of {experts}")
    return ids


def for_shape(shape: MoeShape) -> np.ndarray:
    """``ids[step, request, layer, top_k]`` for the shape's layers and experts (int32)."""
    ids = load()
    group_experts, recorded_k = 32, ids.shape[3]
    groups = shape.experts // group_experts
    picks = shape.top_k // groups
    if groups * group_experts != shape.experts or not 1 <= picks <= recorded_k or picks * groups != shape.top_k:
        raise ValueError(f"the trace cannot be laid over {shape.experts} experts, {shape.top_k} a token")
    if groups * shape.layers > ids.shape[2]:
        raise ValueError(f"{shape.layers} layers of {groups} groups need more than the trace's {ids.shape[2]} layers")
    layers = []
    for layer in range(shape.layers):
        sources = range(layer * groups, (layer + 1) * groups)
        layers.append(
            np.concatenate([ids[:, :, s, :picks] + np.int32(g * group_experts) for g, s in enumerate(sources)], axis=-1)
        )
    return np.stack(layers, axis=2).astype(np.int32)


def hottest(ids: np.ndarray, experts: int, share: float) -> np.ndarray:
    """``bool[layer, expert]``: that share of each layer's experts, those picked most often in ``ids[..., layer, k]``."""
    layers = ids.shape[-2]
    chosen = np.zeros((layers, experts), dtype=bool)
    for layer in range(layers):
        counts = np.bincount(ids[..., layer, :].ravel(), minlength=experts)
        chosen[layer, np.argsort(-counts, kind="stable")[: round(share * experts)]] = True
    return chosen

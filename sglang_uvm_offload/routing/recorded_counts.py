"""A profile of the counts that SGLang's expert distribution recorder writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts
from sglang_uvm_offload.routing.profile import PROFILE_FILE, Profile, ProfileError, RoutedModel


def save(path: str | os.PathLike[str], logical_count: Any, name: str, architecture: str, top_k: int) -> None:
    """Write the profile of ``logical_count``: integers ``[layers, experts]``, or ``[steps, layers, experts]``, with zeros for
    layers without experts. ``name``: of the checkpoint's folder. ``architecture``: as its config.json names the class. Raises
    ``ProfileError`` for other arrays, and ``OSError`` if another kind of file is at ``path``."""
    routed = np.asarray(logical_count)
    if routed.ndim not in (2, 3) or not np.issubdtype(routed.dtype, np.integer) or not routed.size or routed.min() < 0:
        raise ProfileError(f"logical_count must be counts [layers, experts], not {routed.dtype} {list(routed.shape)}")
    routed = routed.astype(np.int64) if routed.ndim == 2 else routed.sum(axis=0, dtype=np.int64)
    layers = np.flatnonzero(routed.any(axis=1))
    model = RoutedModel(name, architecture, tuple(map(int, layers)), routed.shape[1], top_k)
    counts = np.zeros((len(layers), len(Phase), 2, routed.shape[1]), dtype=np.int64)
    # The recorder does not tell prefill from decode: each token counts as a step of one request.
    counts[:, Phase.DECODE, ROUTED] = counts[:, Phase.DECODE, ACTIVATIONS] = routed[layers]
    tokens = int(routed.sum(axis=1).max()) // max(1, top_k)
    profile = Profile(model, RoutingCounts(counts, (0, tokens)))
    atomic_file.replace(Path(path), profile.write, PROFILE_FILE)

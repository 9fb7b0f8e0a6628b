"""Frees expert tensors of SGLang's layers that no kernel of their runner reads."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.plugin.compat import moe_runner_backend

_FOR_FLASHINFER = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")
"""NVFP4 scales in the order of FlashInfer's kernels. SGLang allocates them in every layer."""


def free(layer: Any) -> bool:
    """Free these tensors of a layer that Marlin computes: one byte per 16 4-bit weights, never written. Returns whether there
    were any."""
    names = [name for name in _FOR_FLASHINFER if getattr(layer, name, None) is not None]
    backend = moe_runner_backend(layer) if names else None
    if backend is None or not backend.is_marlin():
        return False
    for name in names:
        delattr(layer, name)
    return True

"""Expert tensors that SGLang's layers hold and that no kernel of their runner reads."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.plugin.compat import moe_runner_backend

_FOR_FLASHINFER = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")
"""NVFP4's scales in the order of FlashInfer's kernels. Every layer is built with room for them."""


def free(layer: Any) -> bool:
    """Take the room from a layer that Marlin computes: a byte for each 16 weights of 4 bits, which is never written. Returns
    whether there was any."""
    names = [name for name in _FOR_FLASHINFER if getattr(layer, name, None) is not None]
    backend = moe_runner_backend(layer) if names else None
    if backend is None or not backend.is_marlin():
        return False
    for name in names:
        delattr(layer, name)
    return True

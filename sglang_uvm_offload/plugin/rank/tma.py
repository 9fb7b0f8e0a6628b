"""Hooks on the TMA descriptors of SGLang's Triton MoE kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

_KERNELS = "sglang.kernels.ops.moe.fused_moe_triton_kernels"


def install(add: Callable[[str, Any, HookType], None], *, allowed: bool) -> None:
    """``allowed``: whether weights may be loaded by TMA. If not, SGLang reads tile configurations with ``USE_TMA`` as on a GPU
    that has none: the same tiles, by plain loads."""
    if allowed:
        add(f"{_KERNELS}._get_b_tma_desc_cached", _of_these_weights, HookType.AROUND)
    else:
        add(f"{_KERNELS}.support_tensor_descriptor", lambda: False, HookType.REPLACE)


def _of_these_weights(original: Callable[..., Any], weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Triton reads the address from the tensor that a descriptor holds. SGLang caches descriptors, in older versions by address
    and shape alone. Layers that compute from one stream buffer then share a descriptor of the first of them, whose tensor has
    returned to that layer's own experts."""
    descriptor = original(weights, *args, **kwargs)
    return descriptor if descriptor.base is weights else dataclasses.replace(descriptor, base=weights)

"""``--expert-offload-tma off``: SGLang's Triton MoE kernels load no weights by TMA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


def install(add: Callable[[str, Any, HookType], None]) -> None:
    """SGLang then reads tile configurations with ``USE_TMA`` as on a GPU that has none: the same tiles, by plain loads."""
    add("sglang.kernels.ops.moe.fused_moe_triton_kernels.support_tensor_descriptor", lambda: False, HookType.REPLACE)

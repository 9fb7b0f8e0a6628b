"""How shims reach into SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


def around(target: str, hook: Callable[..., Any]) -> None:
    """Call ``hook(original, *args, **kwargs)`` in place of the function at ``target``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """For SGLang's ``get_device``, which looks for an accelerator and finds none."""
    return "cpu"


class OnCpu(TorchFunctionMode):
    """Takes the CPU where a call names CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

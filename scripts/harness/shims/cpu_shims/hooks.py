"""How shims reach into SGLang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def around(target: str, hook: Callable[..., Any]) -> None:
    """Call ``hook(original, *args, **kwargs)`` in place of the function at ``target``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)


def on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """For SGLang's ``get_device``, which looks for an accelerator and finds none."""
    return "cpu"

"""Registers the shims with SGLang's plugin hooks."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from torch.overrides import TorchFunctionMode

_targets: list[str] = []


def around(target: str, hook: Callable[..., Any]) -> None:
    """Call ``hook(original, *args, **kwargs)`` in place of the function at ``target``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, hook, HookType.AROUND)
    _targets.append(target)


def instead(target: str, function: Callable[..., Any]) -> None:
    """Replace the function at ``target``; hooks around it wrap ``function``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType.REPLACE)
    _targets.append(target)


def search_once() -> None:
    """Have SGLang search all modules once for all shims instead of once per shim, in each process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_uvm_offload.plugin.imported_names import searched_once

    apply = HookRegistry.apply_hooks

    def apply_in_one_search() -> None:
        for target in _targets:
            resolve_name(target.rpartition(".")[0])  # imports the module, so that the search finds it
        with searched_once(_targets):
            apply()

    HookRegistry.apply_hooks = staticmethod(apply_in_one_search)


def on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Answer for SGLang's ``get_device``, which fails without an accelerator."""
    return "cpu"


class OnCpu(TorchFunctionMode):
    """Runs calls that name ``device="cuda"`` on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

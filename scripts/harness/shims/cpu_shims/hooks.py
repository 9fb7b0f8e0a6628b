"""How shims reach into SGLang."""

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
    """Have ``function`` in place of the one at ``target``, inside of all that hooks it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, function, HookType.REPLACE)
    _targets.append(target)


def search_once() -> None:
    """Have SGLang look through all modules once for all shims, instead of for each: it applies them in each process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_uvm_offload.plugin.imported_names import searched_once

    apply = HookRegistry.apply_hooks

    def apply_in_one_search() -> None:
        for target in _targets:
            resolve_name(target.rpartition(".")[0])  # imports what is to be found
        with searched_once(_targets):
            apply()

    HookRegistry.apply_hooks = staticmethod(apply_in_one_search)


def on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """For SGLang's ``get_device``, which looks for an accelerator and finds none."""
    return "cpu"


class OnCpu(TorchFunctionMode):
    """Takes the CPU where a call names CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))

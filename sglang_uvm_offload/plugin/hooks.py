"""Installs and verifies hooks, because SGLang only logs a target that it cannot patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.imported_names import searched_once

_targets: list[str] = []


def add(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Register ``hook`` on the dotted ``target``. The next ``HookRegistry.apply_hooks`` applies and verifies it. It skips
    targets that another plugin has already patched, so those are hooked at once, around the other plugin's hook."""
    if target in HookRegistry._patched:
        HookRegistry._apply_target(target, [(kind, hook, None)])
    else:
        HookRegistry.register(target, hook, kind)
    _targets.append(target)


def added(target: str) -> bool:
    """Whether this process has registered a hook on ``target``."""
    return target in _targets


def missing() -> str | None:
    """An error message that names our unhooked targets, or None if all are hooked."""
    absent = [target for target in _targets if target not in HookRegistry._patched]
    if not absent:
        return None
    return f"does not support this SGLang version: could not hook {', '.join(absent)}"


def install() -> None:
    """Verify all targets whenever hooks are applied."""
    original = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        with searched_once(_targets):
            original()
        if reason := missing():
            enforce.fail(reason)

    HookRegistry.apply_hooks = staticmethod(apply_and_check)

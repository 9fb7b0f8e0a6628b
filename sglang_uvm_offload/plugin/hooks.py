"""Putting hooks in place, and making sure that they are: SGLang logs a target that it cannot patch and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_targets: list[str] = []


def add(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Register ``hook`` on the dotted ``target``; it is applied, and checked, with the next ``HookRegistry.apply_hooks``."""
    HookRegistry.register(target, hook, kind)
    _targets.append(target)


def install() -> None:
    """Hook ``publish``, from which on a process knows its arguments, and check all targets whenever hooks are applied."""
    add("sglang.srt.runtime_context.publish", _after_publish, HookType.AFTER)
    original = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        original()
        missing = [target for target in _targets if target not in HookRegistry._patched]
        if missing:
            raise SystemExit(
                "sglang-uvm-offload does not fit this SGLang: it could not hook "
                + ", ".join(missing)
                + ". Install a supported SGLang version, or uninstall sglang-uvm-offload."
            )

    HookRegistry.apply_hooks = staticmethod(apply_and_check)


def _after_publish(result: Any, server_args: Any, *args: Any, role: str, **kwargs: Any) -> None:
    """In a scheduler that is to offload, hook what computes. Everywhere else nothing more is hooked, and nothing costs."""
    from sglang_uvm_offload.plugin.server_args import config_of

    config = config_of(server_args)
    if role == "scheduler" and config.enabled:
        from sglang_uvm_offload.plugin import runtime

        runtime.install(config, add)
        HookRegistry.apply_hooks()

"""Installing hooks, and verifying them: SGLang only logs a target that it cannot patch."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.server_config import config_of

_PUBLISH = "sglang.srt.runtime_context.publish"
_targets: list[str] = []
_roles: set[str] = set()
"""Those for which this process has installed its hooks."""


def add(target: str, hook: Callable[..., Any], kind: HookType) -> None:
    """Register ``hook`` on the dotted ``target``; it is applied, and checked, with the next ``HookRegistry.apply_hooks``. That
    passes over a target which has hooks of another plugin by now: there the hook goes around these at once."""
    if target in HookRegistry._patched:
        HookRegistry._apply_target(target, [(kind, hook, None)])
    else:
        HookRegistry.register(target, hook, kind)
    _targets.append(target)


def installed() -> bool:
    """Whether this process has registered any hook."""
    return bool(_targets)


def missing() -> str | None:
    """An error that names our targets without a hook, None if all are hooked."""
    absent = [target for target in _targets if target not in HookRegistry._patched]
    if not absent:
        return None
    return f"does not fit this SGLang version: it could not hook {', '.join(absent)}"


def watching() -> bool:
    """Whether this process will install the scheduler's hooks if its arguments enable offloading."""
    return _PUBLISH in HookRegistry._patched


def watch() -> None:
    """Hook ``publish``, after which a process knows its arguments."""
    if _PUBLISH not in _targets:
        add(_PUBLISH, _after_publish, HookType.AFTER)


def install() -> None:
    """Check all targets whenever hooks are applied. Processes that SGLang starts also ``watch``, because they get their
    arguments later. A launcher watches only after it has accepted the flags: each target costs a search of all modules."""
    if multiprocessing.parent_process() is not None:
        watch()
    original = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        original()
        if reason := missing():
            enforce.fail(reason)

    HookRegistry.apply_hooks = staticmethod(apply_and_check)


def _after_publish(result: Any, server_args: Any, *args: Any, role: str, **kwargs: Any) -> None:
    """In a scheduler that must offload, install its hooks, and in the launcher, add the HTTP routes. Other processes get no
    hooks and pay nothing. Hooks are installed once, however often arguments are published."""
    config = config_of(server_args)
    if config is None:
        return
    if role == "tokenizer":
        from sglang_uvm_offload.plugin import http_routes

        http_routes.add_where_served()
    if role in _roles:
        return
    if role == "tokenizer" and (config.save_profile is not None or config.trace is not None):
        from sglang_uvm_offload.plugin import end_of_serving

        _roles.add(role)
        end_of_serving.install(add)
        HookRegistry.apply_hooks()
    if role == "scheduler":
        from sglang.srt.runtime_context import get_exec, get_lora

        from sglang_uvm_offload.plugin import runtime

        _roles.add(role)
        execution, adapters = get_exec(), bool(get_lora().enable_lora)
        saver, compiled = execution.features.enable_memory_saver, execution.graph.enable_torch_compile
        runtime.install(config, add, adapters=adapters, memory_saver=bool(saver), compiled=bool(compiled))
        HookRegistry.apply_hooks()
        if reason := missing():  # whether or not its environment says that it must offload: its arguments do
            enforce.end(f"sglang-uvm-offload {reason}")

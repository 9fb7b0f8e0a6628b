"""Installs the hooks of each server process, by the role for which SGLang publishes its arguments."""

from __future__ import annotations

import multiprocessing
from traceback import walk_stack
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_uvm_offload.plugin import enforce, hooks
from sglang_uvm_offload.plugin.server_config import config_of

_PUBLISH = "sglang.srt.runtime_context.publish"
_installed: set[str] = set()
"""The roles whose hooks this process has installed."""


def watching() -> bool:
    """Whether this process will install the scheduler's hooks if its arguments enable offloading."""
    return _PUBLISH in HookRegistry._patched


def publishing() -> str | None:
    """The role for which SGLang is inside ``publish`` right now, too late to hook it; None outside."""
    frames = (frame for frame, _ in walk_stack(None))
    mine = (each for each in frames if f"{each.f_globals.get('__name__')}.{each.f_code.co_name}" == _PUBLISH)
    return next((str(each.f_locals["role"]) for each in mine), None)


def watch() -> None:
    """Hook ``publish``, after which a process knows its arguments. A launcher calls this only once it has flags, because each
    target costs a scan of all modules."""
    if not hooks.added(_PUBLISH):
        hooks.add(_PUBLISH, _after_publish, HookType.AFTER)


def watch_in_children() -> None:
    """``watch`` in a process that SGLang started, which gets its arguments later."""
    if multiprocessing.parent_process() is not None:
        watch()


def _after_publish(result: Any, server_args: Any, *args: Any, role: str, **kwargs: Any) -> None:
    """Install the hooks of an offloading scheduler or of a data-parallel controller, and add the HTTP routes in the launcher.
    Other processes get no hooks and pay nothing. Hooks are installed once, however often SGLang publishes arguments."""
    config = config_of(server_args)
    if config is None:
        return
    if role == "tokenizer":
        from sglang_uvm_offload.plugin.operate import http_routes

        http_routes.add_where_served()
    if role in _installed:
        return
    if role == "tokenizer" and config.saves:
        from sglang_uvm_offload.plugin.operate import end_of_serving

        _installed.add(role)
        end_of_serving.install(hooks.add)
        HookRegistry.apply_hooks()
    if role == "dp_controller":
        from sglang_uvm_offload.plugin.operate import replicas, shared_signals

        _installed.add(role)
        replicas.install(hooks.add)
        HookRegistry.apply_hooks()
        if config.saves:
            shared_signals.outlive()
    if role == "scheduler":
        from sglang.srt.runtime_context import get_exec, get_lora

        from sglang_uvm_offload.plugin.rank import scheduler_hooks

        _installed.add(role)
        execution, adapters = get_exec(), bool(get_lora().enable_lora)
        saver, compiled = execution.features.enable_memory_saver, execution.graph.enable_torch_compile
        scheduler_hooks.install(config, hooks.add, adapters=adapters, memory_saver=bool(saver), compiled=bool(compiled))
        HookRegistry.apply_hooks()
        if reason := hooks.missing():  # its arguments demand offloading, even if its environment does not
            enforce.end(f"sglang-uvm-offload {reason}")

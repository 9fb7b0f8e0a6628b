"""Hook on SGLang's data-parallel controller, which passes only part of its schedulers' reports on to ``/server_info``. Before
0.5.23 it keeps none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.flags import PREFIX
from sglang_uvm_offload.plugin.since import VERSION

_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"


def install(add: Callable[[str, Any, HookType], None]) -> None:
    if VERSION >= (0, 5, 23):
        add(f"{_CONTROLLER}.get_init_info", after_init_info, HookType.AFTER)


def after_init_info(result: dict[str, Any], controller: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Adds what the ranks have decided. Each replica decides for itself; where they differ, the value lists all."""
    found: dict[str, set[str]] = {}
    for info in controller._scheduler_init_infos:
        for name, value in info.items():
            if name.startswith(PREFIX):
                found.setdefault(name, set()).add(value)
    return result | {name: ", ".join(sorted(values, key=lambda value: (len(value), value))) for name, values in found.items()}

"""Saves the profile and the trace on SIGTERM. SGLang first answers pending requests and those that keep arriving, so the final
save comes minutes later, or never if the server is killed before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.plugin.operate.actions import END

logger = logging.getLogger(__name__)

_HANDLER = "sglang.srt.managers.tokenizer_manager.SignalHandler.sigterm_handler"
_under_way: set[asyncio.Task[None]] = set()


def install(add: Callable[[str, Any, HookType], None]) -> None:
    """Install the hook. Call in the process that gets the signal."""
    add(_HANDLER, _after_sigterm, HookType.AFTER)


def _after_sigterm(result: Any, handler: Any, *args: Any, **kwargs: Any) -> None:
    """Runs on the event loop."""
    task = asyncio.get_running_loop().create_task(_save(handler.tokenizer_manager))
    _under_way.add(task)  # the event loop keeps only weak references to tasks
    task.add_done_callback(_under_way.discard)


async def _save(manager: Any) -> None:
    try:
        await manager.set_internal_state(SetInternalStateReq(server_args=END))
    except Exception as error:  # noqa: BLE001 -- the server ends, and its ranks save again at exit
        logger.warning("Expert offload: could not save on SIGTERM: %s: %s", type(error).__name__, error)

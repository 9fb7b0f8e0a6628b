"""Saves the profile, the trace and the statistics before SGLang ends the ranks.

- SIGTERM: SGLang first answers pending requests and those that keep arriving, so the ranks' own save at exit comes minutes
  later, or never if the server is killed before.
- Ctrl-C: SGLang kills the ranks within a second.
- ``sglang.Engine``: SGLang kills the ranks when ``shutdown`` is called or the program exits.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import kill_process_tree

from sglang_uvm_offload.files.autosave import LAST_SECONDS
from sglang_uvm_offload.plugin.operate.actions import END
from sglang_uvm_offload.plugin.operate.all_ranks import deliver, saved

logger = logging.getLogger(__name__)

_HANDLER = "sglang.srt.managers.tokenizer_manager.SignalHandler"


def install(add: Callable[[str, Any, HookType], None]) -> None:
    """Install the hooks. Call in the process that serves HTTP, or that has the engine."""
    end = _End()
    add(f"{_HANDLER}.__init__", end.after_init, HookType.AFTER)
    add(f"{_HANDLER}.sigterm_handler", end.after_sigterm, HookType.AFTER)
    add(f"{_HANDLER}.running_phase_sigquit_handler", end.around_sigquit, HookType.AROUND)
    add("sglang.srt.entrypoints.engine.Engine.shutdown", end.before_shutdown, HookType.BEFORE)


class _End:
    """Its hooks run on the event loop of the process, but for those of an engine, which run while the loop does not."""

    def __init__(self) -> None:
        self._save: asyncio.Task[None] | None = None
        self._engines: dict[Any, asyncio.AbstractEventLoop] = {}
        """The loop of each engine whose ranks run, by its tokenizer manager."""

    def after_init(self, result: Any, handler: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        """SGLang makes its handlers with the first request, once uvicorn has set its own."""
        loop, stop = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)
        if callable(stop) and isinstance(getattr(stop, "__self__", None), uvicorn.Server):
            self._save_before(stop, loop, manager)
        else:  # Ctrl-C belongs to the user's program
            self._engines[manager] = loop
            atexit.register(self._save_engine, manager)  # runs before SGLang's, which was registered earlier

    def before_shutdown(self, engine: Any, *args: Any, **kwargs: Any) -> None:
        self._save_engine(engine.tokenizer_manager)

    def after_sigterm(self, result: Any, handler: Any, *args: Any, **kwargs: Any) -> None:
        self._begin(handler.tokenizer_manager)

    def around_sigquit(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """SGLang ends the server when one of its processes has died, as some do by a signal to all of them: save first. Then
        kill the ranks, which are healthy, or SGLang would wait a minute for their core dumps."""

        def quit(save: object) -> None:
            try:
                kill_process_tree(os.getpid(), include_parent=False)
            finally:  # it raises where a rank outlives SIGKILL for a minute, in the driver
                original(*args, **kwargs)

        if self._save is None:
            original(*args, **kwargs)
        else:
            self._save.add_done_callback(quit)

    def _save_before(self, stop: Callable[[int, FrameType | None], Any], loop: asyncio.AbstractEventLoop, manager: Any) -> None:
        """Put a save before what uvicorn does on Ctrl-C. A second Ctrl-C does not wait for it."""

        def save_first() -> None:
            self._begin(manager).add_done_callback(lambda save: stop(signal.SIGINT, None))

        def give_up() -> None:
            if self._save is not None:
                self._save.cancel()

        def interrupted(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, interrupted_again)
            loop.call_soon_threadsafe(save_first)

        def interrupted_again(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(give_up)
            stop(number, frame)

        signal.signal(signal.SIGINT, interrupted)

    def _begin(self, manager: Any) -> asyncio.Task[None]:
        if self._save is None or self._save.done():
            self._save = asyncio.get_running_loop().create_task(_save(manager))
        return self._save

    def _save_engine(self, manager: Any) -> None:
        loop = self._engines.pop(manager, None) if manager is not None else None
        if loop is None or loop.is_closed():
            return
        if loop.is_running():
            logger.warning("Expert offload: nothing is saved by an Engine.shutdown() inside the engine's event loop")
            return
        loop.run_until_complete(_save(manager))


async def _save(manager: Any) -> None:
    async def save() -> None:
        await deliver(manager, END)
        await saved(manager)

    try:
        await asyncio.wait_for(save(), LAST_SECONDS)
    except asyncio.TimeoutError:
        logger.warning("Expert offload: saving at the end takes more than %g s; the server ends without it", LAST_SECONDS)
    except Exception as error:  # noqa: BLE001 -- of any type, from SGLang's request; what fails to save must still end
        logger.warning("Expert offload: could not save at the end: %s: %s", type(error).__name__, error)

"""Work alongside the forward steps, one task after the other on a thread of its own. A failure ends moves, never serving."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any

logger = logging.getLogger(__name__)

STUCK_SECONDS = 600.0
"""Background work that takes longer counts as hung."""


class Worker:
    """Moves experts, and checks residents for evictions."""

    def __init__(self, executor: Executor | None):
        """``executor`` runs one task after the other; None: on the calling thread."""
        self.executor = executor or ThisThread()
        self.fault: str | None = None
        """Why residents no longer change on this rank, None while they may. Peers do not know it."""
        self._moving: Future[None] | None = None
        """The last move, which may be under way."""
        self._checking: Future[None] | None = None

    def submit_move(self, move: Callable[[], str | None]) -> None:
        """Run ``move`` after what was submitted before; it returns its fault, if any. It changes where steps read the experts'
        bytes, not the bytes."""

        def guarded() -> None:
            try:
                fault = move()
                self.fault = self.fault or fault
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- logged with its trace and shown as the fault
                # Nobody reads a move's result, so an error would be lost here. Steps are right wherever the bytes are; a GPU
                # error recurs at the next kernel and ends the process there.
                self.stop("moving experts", error)

        self._moving = self.executor.submit(guarded)

    def submit_check(self, check: Callable[..., None], *args: Any) -> None:
        """Run ``check``, which raises nothing, after what was submitted before."""
        self._checking = self.executor.submit(check, *args)

    @property
    def moving(self) -> bool:
        """Whether a move is under way."""
        return self._moving is not None and not self._moving.done()

    @property
    def checking(self) -> bool:
        """Whether a check for evictions is under way."""
        return self._checking is not None and not self._checking.done()

    def wait(self) -> None:
        """Wait for the work under way. Raises ``TimeoutError`` if it hangs."""
        tasks = [task for task in (self._moving, self._checking) if task is not None]
        if wait(tasks, STUCK_SECONDS).not_done:
            raise TimeoutError(f"moves of experts have not ended in {STUCK_SECONDS:g} s; start the server anew")

    def stop(self, what: str, error: BaseException) -> None:
        """Residents stay where they are from now on, because ``what`` failed."""
        self.fault = f"{what} failed: {type(error).__name__}: {error}"
        logger.error(
            "Expert offload: adapting stopped: %s. Serving goes on with the current residents; outputs are not affected.",
            self.fault,
            exc_info=error,
        )


class ThisThread(Executor):
    """Runs each task when it is submitted, on the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- kept, as by any executor, for ``Future.result``, which raises it
            done.set_exception(error)
        return done

"""Saving what a server has learned, now and then, beside its work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 300.0
"""What is lost at most if a busy server is killed."""
PAUSE_SECONDS = 10.0
"""How soon a server that has nothing to do may save again."""

Snapshot = Callable[[bool], Callable[[], None] | None]
"""Called between steps; returns what writes the file as of now, or None where there is nothing new. With True it may wait for
the device."""


class Saver:
    """Writes on a thread of its own, one file at a time, so that no step waits. A save that fails is told, and tried again
    later."""

    def __init__(self, what: str, snapshot: Snapshot, clock: Callable[[], float] = time.monotonic):
        self._what = what
        self._snapshot = snapshot
        self._clock = clock
        self._saved_at = clock()
        self._thread: threading.Thread | None = None

    def now_and_then(self) -> None:
        """Call it between steps."""
        self._save_after(PERIOD_SECONDS)

    def when_idle(self) -> None:
        """Call it while there are no requests."""
        self._save_after(PAUSE_SECONDS)

    def finish(self) -> None:
        """The server ends: save what is new, and wait for it."""
        if self._thread is not None:
            self._thread.join()
        write = self._snapshot(True)
        if write is not None:
            self._write(write)

    def _save_after(self, seconds: float) -> None:
        if self._clock() - self._saved_at < seconds or (self._thread is not None and self._thread.is_alive()):
            return
        write = self._snapshot(False)
        if write is None:
            return
        self._saved_at = self._clock()
        self._thread = threading.Thread(target=self._write, args=(write,), name=f"save {self._what}", daemon=True)
        self._thread.start()

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            logger.error("Expert offload: the %s could not be saved: %s. Serving goes on.", self._what, error)

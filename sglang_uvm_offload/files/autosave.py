"""Saving a running server's files periodically, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 300.0
"""How often a busy server saves: the most that is lost if it is killed."""
PAUSE_SECONDS = 10.0
"""The least time between saves of an idle server."""

LAST_SECONDS = 30.0
"""How long a server that ends waits for the save under way."""

Snapshot = Callable[[bool], Callable[[], None] | None]
"""Called between steps. Returns a function that writes the current state, None if nothing is new. With True it may wait for the
device."""


class Saver:
    """Writes on a thread of its own, one save at a time, so that no step waits. A failed save is logged, and tried again
    later."""

    def __init__(self, what: str, snapshot: Snapshot, clock: Callable[[], float] = time.monotonic):
        self._what = what
        self._snapshot = snapshot
        self._clock = clock
        self._saved_at = clock()
        self._thread: threading.Thread | None = None

    def save_if_due(self) -> None:
        """Call it between steps."""
        self._save_after(PERIOD_SECONDS)

    def save_when_idle(self) -> None:
        """Call it while there are no requests."""
        self._save_after(PAUSE_SECONDS)

    def finish(self) -> None:
        """Call it when the server ends: saves what is new, and waits for it. Never raises: other files are to be saved too."""
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
            if self._thread.is_alive():
                logger.error("Expert offload: the %s could not be saved: the save before hangs", self._what)
                return
        self._write(self._save_now)

    def _save_now(self) -> None:
        write = self._snapshot(True)
        if write is not None:
            write()

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
        except Exception as error:  # logged with its trace; neither serving nor the other files depend on this one
            what = f"{type(error).__name__}: {error}"
            logger.error("Expert offload: the %s could not be saved: %s. Serving goes on.", self._what, what, exc_info=error)

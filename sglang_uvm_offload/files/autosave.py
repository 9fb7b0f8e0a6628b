"""Saving a running server's files periodically, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sglang_uvm_offload.files.atomic import WriteRefused

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
    """Writes on a thread of its own, one save at a time, so that no step waits. A save that fails, also for want of memory or
    of a thread, is logged and tried again later: nothing but an exit of the process comes out of here."""

    def __init__(self, what: str, snapshot: Snapshot, clock: Callable[[], float] = time.monotonic, path: Path | None = None):
        """``path`` is for the log."""
        self.what = what
        self._path = path
        self.saved_at: float | None = None
        """When a save last ended well, in seconds since 1970."""
        self.failures = 0
        self.error: str | None = None
        """Why the last save failed, None if it did not."""
        self._snapshot = snapshot
        self._clock = clock
        self._begun_at = clock()
        self._asked = False
        """Whether a save was asked for that has not begun."""
        self._ending = False
        """Whether the server ends. Its log then says what is saved."""
        self._unlogged = False
        """Whether a save ended well that the log does not have."""
        self._thread: threading.Thread | None = None

    @property
    def under_way(self) -> bool:
        """Whether a save is being written, or asked for and about to begin."""
        return self._asked or self._writing

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save_now(self) -> None:
        """Save what is new up to the last step launched, now, or as soon as a save under way has ended. Call it between
        steps."""
        self._asked = True
        self._save_after(0.0)

    def save_if_due(self) -> None:
        """Call it between steps."""
        self._save_after(PERIOD_SECONDS)

    def save_when_idle(self) -> None:
        """Call it while there are no requests."""
        self._save_after(PAUSE_SECONDS)

    def begin_end(self) -> None:
        """``save_now`` for a server that is told to end, which may take minutes until ``finish``."""
        self._ending = True
        self.save_now()

    def finish(self) -> None:
        """Call it when the server ends: saves what is new, and waits for it. Never raises: other files are to be saved too."""
        self._ending = True
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
            if self._thread.is_alive():
                logger.error("Expert offload: the %s could not be saved: the save before hangs", self.what)
                return
        try:
            write = self._snapshot(True)
        except Exception as error:  # noqa: BLE001 -- as in ``_write``
            self._failed(f"{type(error).__name__}: {error}", error)
            return
        if write is not None:
            self._write(write)
        elif self._unlogged:
            self._log_saved()

    def _save_after(self, seconds: float) -> None:
        if self.error is not None:
            seconds = PERIOD_SECONDS  # what fails in a pause would fail, and be logged, in each
        if self._writing or not (self._asked or self._clock() - self._begun_at >= seconds):
            return
        asked, self._asked = self._asked, False
        try:
            write = self._snapshot(asked)
            if write is None:
                return
            self._begun_at = self._clock()
            thread = threading.Thread(target=self._write, args=(write,), name=f"save {self.what}", daemon=True)
            thread.start()
        except Exception as error:  # noqa: BLE001 -- as in ``_write``; the caller launches the server's steps
            self._begun_at = self._clock()
            self._failed(f"{type(error).__name__}: {error}", error)
        else:
            self._thread = thread

    def _write(self, write: Callable[[], None]) -> None:
        try:
            write()
        except WriteRefused as error:
            self._refused(str(error))
        except OSError as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 -- logged with its trace; serving and the other files do not depend on it
            self._failed(f"{type(error).__name__}: {error}", error)
        else:
            self.saved_at, self.error, self._unlogged = time.time(), None, True
            if self._ending:
                self._log_saved()

    def _log_saved(self) -> None:
        self._unlogged = False
        logger.info("Expert offload: the %s is saved%s", self.what, "" if self._path is None else f" to {self._path}")

    def _refused(self, reason: str) -> None:
        """Every save is refused until someone moves the file away, so the log gives a reason only once."""
        if reason != self.error:
            self._failed(reason)
            return
        self.failures += 1
        if self._ending:
            logger.warning("Expert offload: the %s is not saved, for the reason logged before", self.what)

    def _failed(self, reason: str, error: Exception | None = None) -> None:
        self.failures += 1
        self.error = reason
        logger.error("Expert offload: the %s could not be saved: %s. Serving goes on.", self.what, reason, exc_info=error)

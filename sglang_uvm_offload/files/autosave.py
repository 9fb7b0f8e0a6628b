"""Saves a running server's files periodically, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sglang_uvm_offload.files.atomic import WriteRefused

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 300.0
"""How often a busy server saves: a killed server loses at most this much."""
PAUSE_SECONDS = 10.0
"""The minimum time between saves of an idle server."""

LAST_SECONDS = 30.0
"""How long an ending server waits for a save in progress."""

Snapshot = Callable[[bool], Callable[[], None] | None]
"""Called between steps. Returns a function that writes the current state, or None if nothing is new. With True, it may wait for
the device."""


class Saver:
    """Writes on its own thread, one save at a time, so that no step waits. A failed save is logged and retried later, even if
    memory or threads ran out. Only an exit of the process propagates to the caller."""

    def __init__(self, what: str, snapshot: Snapshot, clock: Callable[[], float] = time.monotonic, path: Path | None = None):
        """``path`` appears only in the log."""
        self.what = what
        self._path = path
        self.saved_at: float | None = None
        """When a save last succeeded, in seconds since 1970."""
        self.failures = 0
        self.error: str | None = None
        """Why the last save failed; None if it succeeded."""
        self._snapshot = snapshot
        self._clock = clock
        self._begun_at = clock()
        self._asked = False
        """Whether a requested save has not started yet."""
        self._ending = False
        """Whether the server is ending. It then logs successful saves."""
        self._unlogged = False
        """Whether a save has succeeded that is not in the log."""
        self._thread: threading.Thread | None = None

    @property
    def under_way(self) -> bool:
        """Whether a save is in progress or requested."""
        return self._asked or self._writing

    @property
    def _writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save_now(self) -> None:
        """Save everything up to the last launched step: now, or once the save in progress has finished. Call between steps."""
        self._asked = True
        self._save_after(0.0)

    def save_if_due(self) -> None:
        """Save if the last save is ``PERIOD_SECONDS`` old. Call between steps."""
        self._save_after(PERIOD_SECONDS)

    def save_when_idle(self) -> None:
        """Save if the last save is ``PAUSE_SECONDS`` old. Call while there are no requests."""
        self._save_after(PAUSE_SECONDS)

    def begin_end(self) -> None:
        """``save_now`` when the server begins to shut down. Minutes may pass before ``finish``."""
        self._ending = True
        self.save_now()

    def finish(self) -> None:
        """Save what is new and wait for it. Call when the server ends. Never raises, so that other files get saved too."""
        self._ending = True
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)
            if self._thread.is_alive():
                logger.error("Expert offload: the %s could not be saved: the previous save hangs", self.what)
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
            seconds = PERIOD_SECONDS  # a save that fails in one pause would fail, and be logged, in every pause
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
        except Exception as error:  # noqa: BLE001 -- as in ``_write``: the caller must go on launching steps
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
        except Exception as error:  # noqa: BLE001 -- logged with its traceback; serving and the other files go on
            self._failed(f"{type(error).__name__}: {error}", error)
        else:
            self.saved_at, self.error, self._unlogged = time.time(), None, True
            if self._ending:
                self._log_saved()

    def _log_saved(self) -> None:
        self._unlogged = False
        logger.info("Expert offload: the %s is saved%s", self.what, "" if self._path is None else f" to {self._path}")

    def _refused(self, reason: str) -> None:
        """Log a reason only once: every save is refused until someone moves the file away."""
        if reason != self.error:
            self._failed(reason)
            return
        self.failures += 1
        if self._ending:
            logger.warning("Expert offload: the %s is not saved, for the reason logged earlier", self.what)

    def _failed(self, reason: str, error: Exception | None = None) -> None:
        self.failures += 1
        self.error = reason
        logger.error("Expert offload: the %s could not be saved: %s. Serving goes on.", self.what, reason, exc_info=error)

"""Optional work between a scheduler's steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""How long to wait before retrying a failed chore."""


class Chores:
    """Runs chores on the thread that launches steps, where an exception would end the server. A failure (out of memory, disk or
    processes) is logged once per chore and retried later. ``SystemExit`` propagates."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._again_at: dict[str, float] = {}
        """When each failed chore may be retried."""

    def run(self, what: str, chore: Callable[[], object]) -> None:
        """Run ``chore``. ``what`` identifies it, for example "publishing metrics"."""
        if self._clock() < self._again_at.get(what, 0.0):
            return
        try:
            chore()
        except Exception as error:
            if what not in self._again_at:
                logger.exception(
                    "Expert offload: %s failed: %s: %s. Serving continues; later failures are retried without a log line.",
                    what,
                    type(error).__name__,
                    error,
                )
            self._again_at[what] = self._clock() + RETRY_SECONDS

"""Work between a scheduler's steps that serving does not depend on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""How long a chore that failed is left alone."""


class Chores:
    """Runs them on the thread that launches steps, where an error would end the server: what memory, disk or processes run out
    for is logged once for each chore, and tried again later. An exit of the process passes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._again_at: dict[str, float] = {}
        """When the chores that have failed may be tried again."""

    def run(self, what: str, chore: Callable[[], object]) -> None:
        """``what``, as in "publishing metrics", tells the chore from others."""
        if self._clock() < self._again_at.get(what, 0.0):
            return
        try:
            chore()
        except Exception as error:
            if what not in self._again_at:
                logger.exception(
                    "Expert offload: %s failed: %s: %s. Serving goes on; it is tried again, and not logged again.",
                    what,
                    type(error).__name__,
                    error,
                )
            self._again_at[what] = self._clock() + RETRY_SECONDS

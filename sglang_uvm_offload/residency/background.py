"""Choosing residents on a thread of its own, off the forward steps' path."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import PendingCounts

MOVE_BYTES_PER_S = 4 << 30
"""The rate limit of promotions: a small part of a PCIe link, so that moves do not starve zero-copy reads."""
BURST_SECONDS = 0.25
"""How long an unused allowance accumulates."""


class BackgroundAdaptation:
    """Runs an ``Adaptation`` on an executor, one decision at a time. A decision submitted at one poll is collected at the next,
    or at the first poll by which it is ready."""

    def __init__(self, adaptation: Adaptation, clock: Callable[[], float], executor: Executor | None = None):
        """``executor`` runs one task after the other. None: tasks run on the calling thread."""
        self.adaptation = adaptation
        self.clock = clock
        self.executor = executor or ThisThread()
        self._burst = max(BURST_SECONDS * MOVE_BYTES_PER_S, adaptation.max_extent_bytes)
        self._room = 0.0
        """Bytes that may be promoted now."""
        self._refilled_at = clock()
        self._next: Future[np.ndarray | None] | None = None
        self._dropped = False
        """Whether ``_next`` was made for residents that have changed since."""
        self._replaced: ModelExperts | None = None
        """The model, if its tensors were replaced since ``_next`` was submitted."""

    def collect_and_submit(self, pending: PendingCounts, resident: np.ndarray, may_move: bool = True) -> np.ndarray | None:
        """Collect the last decision and submit the next one.

        Returns ``bool[extents]``, the residents to move to; None for no change, or while the decision is not ready.
        The next decision uses the counts ``pending`` and starts from the residents returned, else ``resident``. With
        ``may_move`` False it observes the counts but moves nothing. Raises what the last decision raised."""
        after = None
        if self._next is not None:
            if not self._next.done():
                return None
            after = self._next.result()
        if self._dropped:
            after, self._dropped = None, False
        if after is not None:
            self._room -= self.adaptation.extents.total(after & ~resident)
        self._refill()
        max_bytes = self._room if may_move else 0.0
        replaced, self._replaced = self._replaced, None
        start = resident if after is None else after
        self._next = self.executor.submit(self._decide, pending, start, max_bytes, replaced)
        return after

    def drop(self) -> None:
        """Discard the submitted decision, because residents change for another reason. An error of it is still raised."""
        self._dropped = self._next is not None

    def follow(self, model: ModelExperts) -> None:
        """Decide on the present extents of ``model``, whose tensors were replaced."""
        self.drop()
        self._replaced = model

    def _decide(
        self, pending: PendingCounts, resident: np.ndarray, max_bytes: float, replaced: ModelExperts | None
    ) -> np.ndarray | None:
        if replaced is not None:
            self.adaptation.follow(replaced)
        return self.adaptation.decide(pending.wait(), resident, max_bytes)

    def _refill(self) -> None:
        now = self.clock()
        self._room = min(self._room + (now - self._refilled_at) * MOVE_BYTES_PER_S, self._burst)
        self._refilled_at = now


class ThisThread(Executor):
    """Runs each task when it is submitted, on the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- kept, as by any executor, for ``Future.result``, which raises it
            done.set_exception(error)
        return done

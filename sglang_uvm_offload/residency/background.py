"""Deciding who is to be resident beside the steps, not in their way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.routing.counts import PendingCounts

MOVE_BYTES_PER_S = 4 << 30
"""What continuous adaptation promotes at most: a small part of a PCIe link, so that moves do not starve reads."""
BURST_SECONDS = 0.25
"""For how long what was not promoted may be made up for."""


class Decisions:
    """Has an ``Adaptation`` decide on a thread of its own, one decision after the other. What is decided on the steps up to one
    look is taken at the next, or at the first by which it is decided."""

    def __init__(self, adaptation: Adaptation, clock: Callable[[], float], executor: Executor | None = None):
        """``executor`` runs one task after the other; None: on the calling thread."""
        self.adaptation = adaptation
        self.clock = clock
        self.executor = executor or _ThisThread()
        self._burst = max(BURST_SECONDS * MOVE_BYTES_PER_S, adaptation.most_expert_bytes)
        self._room = 0.0
        """Bytes that may be promoted now."""
        self._refilled_at = clock()
        self._next: Future[np.ndarray | None] | None = None

    def take(self, pending: PendingCounts, resident: np.ndarray, may_move: bool = True) -> np.ndarray | None:
        """``bool[layers, experts]``: the residents decided on, None for no change, or while nothing is decided yet. Then the
        next decision begins, on ``pending`` and on ``resident`` or what replaces it; one that may not move anything only
        learns. Raises what deciding raised."""
        after = None
        if self._next is not None:
            if not self._next.done():
                return None
            after = self._next.result()
        if after is not None:
            self._room -= self.adaptation.bytes_of(after & ~resident)
        self._refill()
        max_bytes = self._room if may_move else 0.0
        self._next = self.executor.submit(self._decide, pending, resident if after is None else after, max_bytes)
        return after

    def drop(self) -> None:
        """Forget the decision that was begun: residents change otherwise."""
        self._next = None

    def _decide(self, pending: PendingCounts, resident: np.ndarray, max_bytes: float) -> np.ndarray | None:
        return self.adaptation.wanted(pending.wait(), resident, max_bytes)

    def _refill(self) -> None:
        now = self.clock()
        self._room = min(self._room + (now - self._refilled_at) * MOVE_BYTES_PER_S, self._burst)
        self._refilled_at = now


class _ThisThread(Executor):
    """Runs a task where and when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- the future keeps it, and raises it in ``take``
            done.set_exception(error)
        return done

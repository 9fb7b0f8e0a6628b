"""Reading the device's counters between steps, and accounting for each step under the residents that served it."""

from __future__ import annotations

import dataclasses

import numpy as np

from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import PendingCounts, RoutingCounters, RoutingCounts


class Observer:
    """Adds the counts of one model's steps to its ledger. Before residents change, call ``poll``, or ``catch_up`` if that
    returns False: each step is then accounted for under the residents that it had, however late its counts arrive. Steps that
    run during a move count for what is resident at the next request."""

    def __init__(self, counters: RoutingCounters, model: ModelExperts):
        self._counters = counters
        self._added: np.ndarray | None = None
        """What ``go_on_from`` added to the device's counts; None before."""
        self._model = model
        self.ledger = Ledger(model.layers, counters.read())
        self._request()

    def poll(self) -> bool:
        """Account for the counts that have arrived, and request new ones, without waiting. False while the last request is in
        flight."""
        if not self.pending.ready():
            return False
        self._account()
        self._request()
        if self.pending.ready():
            self._account()
        return True

    def catch_up(self) -> None:
        """Account for all steps launched so far. Waits for the device."""
        self._account()  # up to the last poll, after which residents may have changed
        self._request()
        self._account()

    def go_on_from(self, counts: RoutingCounts) -> None:
        """Count on from ``counts``, in place of the ledger's present ones. Call ``catch_up`` before."""
        change = counts.counts - self.ledger.counted.counts
        self._added = change if self._added is None else self._added + change
        self.ledger.counted = counts
        self._request()

    def _request(self) -> None:
        arriving = self._counters.read_async()
        self.pending: PendingCounts = arriving if self._added is None else _Added(arriving, self._added)
        """The counts of all steps up to the last poll."""
        self._offloaded = self._model.offloaded_bytes()

    def _account(self) -> None:
        self.ledger.account(self.pending.wait(), self._offloaded)


class _Added:
    """Pending counts, with ``added`` to each."""

    def __init__(self, pending: PendingCounts, added: np.ndarray):
        self._pending, self._added = pending, added

    def ready(self) -> bool:
        return self._pending.ready()

    def wait(self) -> RoutingCounts:
        arrived = self._pending.wait()
        return dataclasses.replace(arrived, counts=arrived.counts + self._added)

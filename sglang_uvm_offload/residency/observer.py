"""Reading the device's counters between steps, and accounting for each step under the residents that served it."""

from __future__ import annotations

from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import PendingCounts, RoutingCounters


class Observer:
    """Adds the counts of one model's steps to its ledger. Before residents change, call ``poll``, or ``catch_up`` if that
    returns False: each step is then accounted for under the residents that it had, however late its counts arrive. Steps that
    run beside a move count for what is resident at the next request."""

    def __init__(self, counters: RoutingCounters, model: ModelExperts):
        self._counters = counters
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

    def _request(self) -> None:
        self.pending: PendingCounts = self._counters.read_async()
        """The counts of all steps up to the last poll."""
        self._offloaded = self._model.offloaded_bytes()

    def _account(self) -> None:
        self.ledger.account(self.pending.wait(), self._offloaded)

"""Looking at what the device counts, between steps, and booking it under the residents that served it."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_uvm_offload.expert_layer import ExpertLayer
from sglang_uvm_offload.ledger import Ledger, stack
from sglang_uvm_offload.routing import AskedCounts, RoutingCounters


class Observer:
    """Brings the counts of one model's steps into its ledger. Before residents change ``look``, or ``catch_up`` where that says
    False: so every step is booked under the residents that it had, however late its counts arrive."""

    def __init__(self, counters: RoutingCounters, layers: Sequence[ExpertLayer]):
        self._counters = counters
        self._layers = layers
        self.ledger = Ledger(layers, counters.read())
        self._ask()

    def look(self) -> bool:
        """Book what has arrived, and ask anew, without waiting. False if what was asked for is still on its way."""
        if not self.asked.ready():
            return False
        self._book()
        self._ask()
        if self.asked.ready():
            self._book()
        return True

    def catch_up(self) -> None:
        """Book all steps launched so far. It waits for the device."""
        self._book()  # up to the last look, after which residents may have changed
        self._ask()
        self._book()

    def _ask(self) -> None:
        self.asked: AskedCounts = self._counters.ask()
        """The counts of all steps up to the last look."""
        self._served = stack([layer.resident for layer in self._layers], self._counters.num_experts)

    def _book(self) -> None:
        self.ledger.account(self.asked.wait(), self._served)

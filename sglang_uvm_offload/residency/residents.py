"""The target model's residents: decided on one rank for all that hold shards of the same experts, and moved to on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import Mover
from sglang_uvm_offload.residency.selection import best_residents, hit_rate
from sglang_uvm_offload.residency.worker import Worker
from sglang_uvm_offload.routing.counts import PendingCounts, RoutingCounts
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

BroadcastDecision = Callable[[Callable[[], Any]], Any]
"""Calls its argument on the first of the ranks that hold shards of the same experts, and returns the result on all of them."""


class Residents:
    """Every rank that holds a shard of the same experts must call each method that decides before the same step. A rank with a
    fault decides nothing and moves nothing, but takes part: its peers wait for it."""

    def __init__(
        self, target: ModelExperts, mover: Mover, worker: Worker, ledger: Ledger, broadcast_decision: BroadcastDecision
    ):
        self._target = target
        self._mover = mover
        self._worker = worker
        self.ledger = ledger
        self.broadcast_decision = broadcast_decision
        self.adaptation: Adaptation | None = None
        """Continuous adaptation, None where it is off or has failed."""
        self._extents: Extents = target.extents
        self.next: np.ndarray = target.resident_extents()
        """``bool[extents]``: those that the last move makes."""

    def best_for(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the best residents for ``seen``; after a fault they stay. Call it on the rank that decides."""
        return resident if self._worker.fault is not None else best_residents(self._target, seen, resident)

    def decide(self, choose: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """``bool[extents]``: the residents before, and those that the rank that decides chooses with ``choose``."""
        self._follow_tensors()
        before = self.next
        after = self.broadcast_decision(lambda: choose(before))
        self.drop_decision()
        return before, after

    def drop_decision(self) -> None:
        """Residents change, or stay, for another reason than what continuous adaptation last decided."""
        if self.adaptation is not None:
            self.adaptation.drop()

    def adapt(self) -> np.ndarray | None:
        """The residents that continuous adaptation has decided to move to, ``bool[extents]``; None for no change."""
        self._follow_tensors()
        before = self.next
        after: np.ndarray | None = self.broadcast_decision(
            lambda: self._of_adaptation(lambda adaptation: adaptation.collect(before))
        )
        return None if self._worker.fault is not None else after

    def decide_next(self, pending: PendingCounts, may_move: bool) -> None:
        """After ``adapt``, and the move that it asked for: the next decision, on the counts ``pending``."""
        self._of_adaptation(lambda adaptation: adaptation.submit(pending, self.next, may_move, self._worker.moving))

    def _of_adaptation(self, ask: Callable[[Adaptation], np.ndarray | None]) -> np.ndarray | None:
        """What it answers; None where it is off, or fails."""
        if self.adaptation is None or self._worker.fault is not None:
            return None
        try:
            return ask(self.adaptation)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- logged with its trace and shown as the fault
            # Steps do not depend on decisions, and peers wait for this rank's answer. A GPU error recurs at the next kernel and
            # ends the process there. The exit of another thread is none of this one's.
            self.adaptation = None
            self._worker.stop("choosing residents", error)
            return None

    def _follow_tensors(self) -> None:
        """An update of the weights may have replaced tensors by some with other extents."""
        if self._target.extents is not self._extents:
            self.begin_anew()

    def begin_anew(self) -> None:
        """The residents are others, moved by none of these decisions."""
        self._extents, self.next = self._target.extents, self._target.resident_extents()
        if self.adaptation is not None:
            self.adaptation.follow(self._target)

    def move_to(self, after: np.ndarray, chosen_from: tuple[RoutingCounts, int] | None = None) -> None:
        """Start to make ``after`` resident (``bool[extents]``). ``chosen_from``: the routing that they were chosen from, and of
        how many tokens; the move is logged with it."""
        before, self.next = self.next, after
        if chosen_from is None:
            self._worker.submit_move(lambda: self._move(after, show=False))
        else:
            self._worker.submit_move(lambda: self._move_and_log(*chosen_from, before, after))

    def _move(self, after: np.ndarray, show: bool) -> str | None:
        """Make ``after`` resident, and add to the ledger. Runs on the worker; returns the fault that ended moving, if any."""
        started = time.perf_counter()
        before = self._target.resident_extents()
        self.ledger.moved_bytes += self._mover.move(self._target.by_layer(after), show)
        self.ledger.moves += int((self._target.resident_extents() & ~before).sum())
        self.ledger.moving_seconds += time.perf_counter() - started
        return self._mover.fault

    def _move_and_log(self, seen: RoutingCounts, tokens: int, before: np.ndarray, after: np.ndarray) -> str | None:
        started, earlier = time.perf_counter(), self.ledger.moved_bytes
        routed, share = seen.routed(), self._target.resident_share
        reached = hit_rate(routed, share(before))
        fault = self._move(after, show=True)
        extents, now = self._target.extents, self._target.resident_extents()
        logger.info(
            "Expert offload: residents chosen from the routing of %d tokens (%d prefill and %d decode steps): "
            "%s of %s of residents changed in %d layers; hit rate of these tokens %.1f %% before, %.1f %% after; "
            "%s moved in %.2f s",
            tokens,
            *seen.steps,
            size(extents.total(now & ~before)),
            size(extents.total(before)),
            len(self._target.layers),
            100 * reached,
            100 * hit_rate(routed, share(now)),
            size(self.ledger.moved_bytes - earlier),
            time.perf_counter() - started,
        )
        return fault

"""Accounts for one model's steps: what they counted, and whether residents, slots or host RAM over PCIe served it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_uvm_offload.expert_location import by_expert
from sglang_uvm_offload.routing.counts import (
    ACTIVATIONS,
    SLOT_BROUGHT,
    SLOT_FILLS,
    SLOT_HITS,
    SLOT_TOKENS,
    PendingCounts,
    Phase,
    RoutingCounters,
    RoutingCounts,
)

if TYPE_CHECKING:
    from sglang_uvm_offload.residency.model import ModelExperts


class Ledger:
    """Totals since the start. Arrays have shape ``[layers]``: int64, or float64 for shares of experts.

    Before residents change, call ``poll``, or ``catch_up`` if that returns False. Each step is then accounted for with the
    residents that it had, however late its counts arrive. Steps that run during a move count with the residents at the next
    request."""

    def __init__(self, counters: RoutingCounters, model: ModelExperts):
        self._counters, self._model = counters, model
        self.counted = counters.read()
        """The counts included in the totals."""
        num_layers = len(model.layers)
        self.routed = np.zeros(num_layers, dtype=np.int64)
        self.routed_resident = np.zeros(num_layers)
        """Routed tokens, and those served by residents or slots, whether the step read in place or streamed. Copies made for
        the same step do not count as served. An expert that is partly in VRAM serves that part of each token."""
        self.activated_bytes = np.zeros(num_layers, dtype=np.int64)
        self.zero_copy_bytes = np.zeros(num_layers, dtype=np.int64)
        """Bytes of placed experts that steps read in place, counting each expert once per step, and the part of them that was
        in host RAM. A prefill step may read them more often."""
        self.streamed_bytes = np.zeros(num_layers, dtype=np.int64)
        """Bytes of offloaded experts copied over the link for steps that stream, counting each byte once per step."""
        self.activations = np.zeros(num_layers, dtype=np.int64)
        self.activations_resident = np.zeros(num_layers)
        """Decode activations of experts that can be offloaded, and those of them served from VRAM."""
        self.slot_hits = np.zeros(num_layers, dtype=np.int64)
        self.slot_fills = np.zeros(num_layers, dtype=np.int64)
        self.slot_bypasses = np.zeros(num_layers, dtype=np.int64)
        """Activations of wholly or partly offloaded experts in layers with slots: served by a slot, copied into one, or read in
        place."""
        self.filled_bytes = np.zeros(num_layers, dtype=np.int64)
        """Bytes of offloaded experts copied over the link into slots."""
        self.slot_brought = np.zeros(num_layers, dtype=np.int64)
        """Experts copied into slots ahead of steps that stream."""
        self.moves = 0
        """Number of extents promoted."""
        self.moved_bytes = 0
        self.moving_seconds = 0.0
        self._gathered: np.ndarray | int = 0
        """The offset that ``rearranged`` added to the device's counts."""
        self._by_expert: np.ndarray | int = 0
        """Counts by the checkpoint's expert up to the last rearrangement, int64 ``[layers, phase, kind, num_logical]``."""
        self._rearranged_at: np.ndarray | int = 0
        """The counts by place right after the last rearrangement."""
        self._request()

    def poll(self) -> bool:
        """Account for the counts that have arrived, and request new ones, without waiting. Returns False while the last request
        is in flight."""
        if not self.pending.ready():
            return False
        self._account()
        self._request()
        if self.pending.ready():
            self._account()
        return True

    def catch_up(self) -> None:
        """Account for all steps launched so far. Waits for the device."""
        self._account()  # first up to the last poll: residents may have changed since
        self._request()
        self._account()

    def counted_by_expert(self) -> RoutingCounts:
        """``counted`` by the checkpoint's expert, even after SGLang rearranged the places: each interval's counts are mapped
        with the locations that it had."""
        new = by_expert(self.counted.counts - self._rearranged_at, self._model.locations, self._model.num_logical)
        return RoutingCounts(self._by_expert + new, self.counted.steps)

    def rearranged(self, own: RoutingCounts, counted: RoutingCounts) -> None:
        """SGLang has rearranged the experts. ``own``: the result of ``counted_by_expert`` before that. ``counted``: the counts
        by place to continue from. Call ``catch_up`` before the rearrangement."""
        self._gathered = self._gathered + counted.counts - self.counted.counts
        self._by_expert, self._rearranged_at = own.counts, counted.counts
        self.counted = counted
        self._request()

    def add_streamed(self, layer: int, nbytes: int) -> None:
        """Account for ``nbytes`` of the layer at index ``layer`` (one without slots) that are copied into VRAM for a step. Like
        all methods, call it on the thread that launches steps."""
        self.streamed_bytes[layer] += nbytes

    def _request(self) -> None:
        self.pending: PendingCounts = self._counters.read_async()
        if isinstance(self._gathered, np.ndarray):
            self.pending = _Added(self.pending, self._gathered)
        self._offloaded = self._model.offloaded_bytes()

    def _account(self) -> None:
        """Add the counts up to the request. All their steps ran with ``_offloaded`` bytes of each expert in host RAM."""
        counts, offloaded = self.pending.wait(), self._offloaded
        if counts.steps == self.counted.steps:
            return
        new = counts.since(self.counted)
        self.counted = counts
        routed, activations, share = new.routed(), new.activations(), self._model.share_in_vram(offloaded)
        self.routed += routed.sum(axis=1)
        self.routed_resident += (routed * share).sum(axis=1)
        self.activated_bytes += activations.sum(axis=1) * self._model.expert_bytes
        self.zero_copy_bytes += (activations * offloaded).sum(axis=1)
        decode = new.counts[:, Phase.DECODE, ACTIVATIONS] * self._model.candidates()
        self.activations += decode.sum(axis=1)
        self.activations_resident += (decode * share).sum(axis=1)
        if new.slots is not None:
            self._account_slots(new.slots, activations * (offloaded > 0), offloaded, 1.0 - share)

    def _account_slots(self, slots: np.ndarray, activations: np.ndarray, offloaded: np.ndarray, share: np.ndarray) -> None:
        """``activations``: those of offloaded experts. ``offloaded`` bytes of each, a ``share``, are in host RAM."""
        tokens, hits, fills = (slots[:, :, kind].sum(axis=1) for kind in (SLOT_TOKENS, SLOT_HITS, SLOT_FILLS))
        hits, fills = hits * (offloaded > 0), fills * (offloaded > 0)
        self.routed_resident += (tokens * share).sum(axis=1)
        self.activations_resident += (slots[:, Phase.DECODE, SLOT_HITS] * share).sum(axis=1)
        self.zero_copy_bytes -= ((hits + fills) * offloaded).sum(axis=1)
        self.filled_bytes += (fills * offloaded).sum(axis=1)
        self.slot_hits += hits.sum(axis=1)
        self.slot_fills += fills.sum(axis=1)
        self.slot_bypasses += (activations - hits - fills).sum(axis=1)
        brought = slots[:, :, SLOT_BROUGHT].sum(axis=1)
        self.slot_brought += brought.sum(axis=1)
        self.streamed_bytes += (brought * offloaded).sum(axis=1)

    @property
    def steps(self) -> int:
        """Number of steps included in the totals."""
        return sum(self.counted.steps)

    @property
    def totals_routed(self) -> tuple[int, float]:
        """Routed tokens over all layers, and those of them that residents or slots served."""
        return int(self.routed.sum()), float(self.routed_resident.sum())

    @property
    def byte_hit_rate(self) -> float | None:
        """The share of the activated experts' bytes that was in VRAM; None before the first activation."""
        used, missed = int(self.activated_bytes.sum()), int(self.zero_copy_bytes.sum() + self.filled_bytes.sum())
        return 1.0 - missed / used if used else None


def hit_rate_of(ledgers: Sequence[Ledger]) -> float | None:
    """The share of routed tokens that residents or slots served, over all ``ledgers``; None before the first token."""
    routed, resident = map(sum, zip((0, 0.0), *(ledger.totals_routed for ledger in ledgers), strict=True))
    return resident / routed if routed else None


class _Added:
    """Pending counts plus ``added``."""

    def __init__(self, pending: PendingCounts, added: np.ndarray):
        self._pending, self._added = pending, added

    def ready(self) -> bool:
        return self._pending.ready()

    def wait(self) -> RoutingCounts:
        arrived = self._pending.wait()
        return dataclasses.replace(arrived, counts=arrived.counts + self._added)

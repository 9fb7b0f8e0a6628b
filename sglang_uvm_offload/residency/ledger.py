"""Totals of where steps were served from: routed tokens on residents, bytes read or copied over PCIe, experts moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_uvm_offload.routing.counts import (
    ACTIVATIONS,
    SLOT_FILLS,
    SLOT_HITS,
    SLOT_KEPT,
    SLOT_STREAMED,
    SLOT_TOKENS,
    Phase,
    RoutingCounts,
)

if TYPE_CHECKING:
    from sglang_uvm_offload.experts.layer import ExpertLayer


class Ledger:
    """Totals since the start over one model's layers. Arrays are ``int64[layers]``."""

    def __init__(self, layers: Sequence[ExpertLayer], start: RoutingCounts):
        self._layers = layers
        self.counted = start
        """The counts included in the totals."""
        self.routed = np.zeros(len(layers), dtype=np.int64)
        self.routed_resident = np.zeros(len(layers))
        """Routed tokens, and those on residents or slots, whether steps read in place or stream. An expert that is in VRAM in
        part serves that part of each token."""
        self.activated_bytes = np.zeros(len(layers), dtype=np.int64)
        self.zero_copy_bytes = np.zeros(len(layers), dtype=np.int64)
        """Bytes of placed experts that steps read in place, each expert once a step, and those of them that were in host RAM. A
        prefill may read them more often."""
        self.streamed_bytes = np.zeros(len(layers), dtype=np.int64)
        """Bytes of offloaded experts that were copied over the link for steps that stream, each byte once a step."""
        self.activations = np.zeros(len(layers), dtype=np.int64)
        self.activations_resident = np.zeros(len(layers))
        """Activations, in decode steps, of experts that can be offloaded, and those served from VRAM."""
        self.slot_hits = np.zeros(len(layers), dtype=np.int64)
        self.slot_fills = np.zeros(len(layers), dtype=np.int64)
        self.slot_bypasses = np.zeros(len(layers), dtype=np.int64)
        """With slots, the activations of experts that are offloaded, in whole or in part: those that a slot served, those that
        filled one, and those that were read in place."""
        self.filled_bytes = np.zeros(len(layers), dtype=np.int64)
        """Bytes of offloaded experts that filled slots over the link."""
        self.slot_kept = np.zeros(len(layers), dtype=np.int64)
        """Experts that steps that streamed have left in slots."""
        self.moves = 0
        """Extents promoted."""
        self.moved_bytes = 0
        self.moving_seconds = 0.0

    def account(self, counts: RoutingCounts, offloaded: np.ndarray) -> None:
        """Add the counts since the last call, of steps that all ran with ``offloaded`` (``int64[layers, experts]``) bytes of
        each expert in host RAM."""
        if counts.steps == self.counted.steps:
            return
        new = counts.since(self.counted)
        self.counted = counts
        width = counts.counts.shape[-1]
        routed, activations = new.routed(), new.activations()
        expert_bytes = np.array([layer.expert_bytes for layer in self._layers], dtype=np.int64)
        share = resident_share(offloaded, expert_bytes)
        self.routed += routed.sum(axis=1)
        self.routed_resident += (routed * share).sum(axis=1)
        self.activated_bytes += activations.sum(axis=1) * expert_bytes
        self.zero_copy_bytes += (activations * offloaded).sum(axis=1)
        offloadable = ~stack([layer.always_resident for layer in self._layers], width) & (expert_bytes > 0)[:, None]
        decode = new.counts[:, Phase.DECODE, ACTIVATIONS] * offloadable
        self.activations += decode.sum(axis=1)
        self.activations_resident += (decode * share).sum(axis=1)
        if new.slots is not None:
            self._account_slots(new.slots, activations * (offloaded > 0), offloaded, 1.0 - share)

    def _account_slots(self, slots: np.ndarray, activations: np.ndarray, offloaded: np.ndarray, share: np.ndarray) -> None:
        """``activations``: those of offloaded experts, of which ``offloaded`` bytes, a ``share``, are in host RAM."""
        tokens, hits, fills = (slots[:, :, kind].sum(axis=1) for kind in (SLOT_TOKENS, SLOT_HITS, SLOT_FILLS))
        hits, fills = hits * (offloaded > 0), fills * (offloaded > 0)
        self.routed_resident += (tokens * share).sum(axis=1)
        self.activations_resident += (slots[:, Phase.DECODE, SLOT_HITS] * share).sum(axis=1)
        self.zero_copy_bytes -= ((hits + fills) * offloaded).sum(axis=1)
        self.filled_bytes += (fills * offloaded).sum(axis=1)
        self.slot_hits += hits.sum(axis=1)
        self.slot_fills += fills.sum(axis=1)
        self.slot_bypasses += (activations - hits - fills).sum(axis=1)
        self.slot_kept += slots[:, :, SLOT_KEPT].sum(axis=(1, 2))
        self.streamed_bytes += (slots[:, :, SLOT_STREAMED].sum(axis=1) * offloaded).sum(axis=1)

    def add_streamed(self, layer: int, nbytes: int) -> None:
        """``nbytes`` of the layer at index ``layer``, which has no slots, are copied into VRAM for a step. Call it on the
        thread that launches steps, as ``account``."""
        self.streamed_bytes[layer] += nbytes

    @property
    def steps(self) -> int:
        """Steps included in the totals."""
        return sum(self.counted.steps)

    @property
    def totals_routed(self) -> tuple[int, float]:
        """Routed tokens over all layers, and those of them on residents or slots."""
        return int(self.routed.sum()), float(self.routed_resident.sum())

    @property
    def hit_rate(self) -> float | None:
        """The share of routed tokens on residents, None before the first."""
        return hit_rate_of([self])

    @property
    def byte_hit_rate(self) -> float | None:
        """The share of the bytes of activated experts that were in VRAM, None before the first."""
        used, missed = int(self.activated_bytes.sum()), int(self.zero_copy_bytes.sum() + self.filled_bytes.sum())
        return 1.0 - missed / used if used else None


def hit_rate_of(ledgers: Sequence[Ledger]) -> float | None:
    """The share of routed tokens on residents, over all of ``ledgers``; None before the first."""
    routed = sum(int(ledger.routed.sum()) for ledger in ledgers)
    return float(sum(ledger.routed_resident.sum() for ledger in ledgers)) / routed if routed else None


def resident_share(offloaded: np.ndarray, expert_bytes: np.ndarray) -> np.ndarray:
    """float ``[layers, experts]``: the share of each expert's bytes in VRAM, where ``offloaded`` of the layer's
    ``expert_bytes`` are not; 1 without placed bytes."""
    return 1.0 - offloaded / np.maximum(expert_bytes, 1)[:, None]


def stack(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    """``[layers, width]`` of rows of up to ``width`` experts, 0 or False beyond a layer's own."""
    out = np.zeros((len(rows), width), dtype=rows[0].dtype if rows else bool)
    for padded, row in zip(out, rows, strict=True):
        padded[: row.size] = row
    return out

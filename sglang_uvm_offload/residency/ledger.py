"""Totals of where steps were served from: routed tokens on residents, bytes read over PCIe, experts moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sglang_uvm_offload.routing.counts import ACTIVATIONS, Phase, RoutingCounts

if TYPE_CHECKING:
    from sglang_uvm_offload.experts.layer import ExpertLayer


class Ledger:
    """Totals since the start over one model's layers. Arrays are ``int64[layers]``."""

    def __init__(self, layers: Sequence[ExpertLayer], start: RoutingCounts):
        self._layers = layers
        self.counted = start
        """The counts included in the totals."""
        self.routed = np.zeros(len(layers), dtype=np.int64)
        self.routed_resident = np.zeros(len(layers), dtype=np.int64)
        """Routed tokens, and those served by an expert in VRAM."""
        self.zero_copy_bytes = np.zeros(len(layers), dtype=np.int64)
        """Bytes of offloaded experts that steps read, each expert once a step. A prefill may read them more often."""
        self.activations = np.zeros(len(layers), dtype=np.int64)
        self.activations_resident = np.zeros(len(layers), dtype=np.int64)
        """Activations, in decode steps, of experts that can be offloaded, and those served from VRAM."""
        self.moves = 0
        self.moved_bytes = 0
        self.moving_seconds = 0.0

    def account(self, counts: RoutingCounts, resident: np.ndarray) -> None:
        """Add the counts since the last call, of steps that all ran with ``resident`` (``bool[layers, experts]``)."""
        if counts.steps == self.counted.steps:
            return
        new = counts.since(self.counted)
        self.counted = counts
        width = counts.counts.shape[-1]
        routed, activations = new.routed(), new.activations()
        self.routed += routed.sum(axis=1)
        self.routed_resident += (routed * resident).sum(axis=1)
        expert_bytes = np.array([layer.expert_bytes for layer in self._layers], dtype=np.int64)
        self.zero_copy_bytes += (activations * ~resident).sum(axis=1) * expert_bytes
        offloadable = ~stack([layer.always_resident for layer in self._layers], width) & (expert_bytes > 0)[:, None]
        decode = new.counts[:, Phase.DECODE, ACTIVATIONS] * offloadable
        self.activations += decode.sum(axis=1)
        self.activations_resident += (decode * resident).sum(axis=1)

    @property
    def steps(self) -> int:
        """Steps included in the totals."""
        return sum(self.counted.steps)

    @property
    def hit_rate(self) -> float | None:
        """The share of routed tokens that residents served, None before the first."""
        routed = int(self.routed.sum())
        return int(self.routed_resident.sum()) / routed if routed else None


def stack(masks: Sequence[np.ndarray], width: int) -> np.ndarray:
    """``bool[layers, width]`` of masks of up to ``width`` experts, False beyond a layer's own."""
    out = np.zeros((len(masks), width), dtype=bool)
    for padded, mask in zip(out, masks, strict=True):
        padded[: mask.size] = mask
    return out

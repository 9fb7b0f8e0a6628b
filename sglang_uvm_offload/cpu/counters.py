"""``RoutingCounters`` for a model that computes on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, IdFormat, PendingCounts, Phase, RoutingCounts


@dataclass(frozen=True)
class ReadyCounts:
    """``PendingCounts`` that have already arrived."""

    counts: RoutingCounts

    def ready(self) -> bool:
        return True

    def wait(self) -> RoutingCounts:
        return self.counts


class CpuRoutingCounters:
    """``RoutingCounters`` for a model that computes on the CPU. Uses NumPy, whose small calls cost a tenth of PyTorch's."""

    def __init__(self, num_layers: int, num_experts: int):
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._counts = np.zeros((num_layers, 2, 2, num_experts), dtype=np.int64)
        self._slots: np.ndarray | None = None
        self._steps = [0, 0]
        self._valid_rows, self._phase = 0, Phase.PREFILL

    def slot_counts(self) -> np.ndarray:
        """int64 ``[layers, 2, 4, experts]``, to which ``CpuSlots`` adds. ``RoutingCounts.slots`` is a copy of it."""
        if self._slots is None:
            self._slots = np.zeros((self.num_layers, 2, 4, self.num_experts), dtype=np.int64)
        return self._slots

    @property
    def step(self) -> tuple[int, Phase]:
        """The current step's valid rows and phase."""
        return self._valid_rows, self._phase

    def begin_step(self, valid_rows: int, phase: Phase) -> None:
        self._valid_rows, self._phase = valid_rows, phase
        self._steps[phase] += valid_rows > 0

    def count(
        self,
        layer: int,
        ids: torch.Tensor,
        first_expert: int,
        id_format: IdFormat,
        *,
        in_place: bool = True,
        lasting: bool = False,
    ) -> None:
        local = ids.numpy()[: self._valid_rows].ravel()
        if id_format is IdFormat.PACKED:
            local = local >> 16
        local = local - first_expert
        local = local[(local >= 0) & (local < self.num_experts)]
        if local.size:
            self._add(layer, np.bincount(local, minlength=self.num_experts), in_place)

    def count_histogram(self, layer: int, histogram: torch.Tensor, *, in_place: bool = True) -> None:
        if self._valid_rows:
            self._add(layer, np.pad(histogram.numpy(), (0, self.num_experts - histogram.numel())), in_place)

    def _add(self, layer: int, histogram: np.ndarray, in_place: bool) -> None:
        counts = self._counts[layer, self._phase]
        counts[ROUTED] += histogram
        if in_place:
            counts[ACTIVATIONS] += histogram > 0

    def read(self) -> RoutingCounts:
        slots = None if self._slots is None else self._slots.copy()
        return RoutingCounts(self._counts.copy(), (self._steps[0], self._steps[1]), slots)

    def read_async(self) -> PendingCounts:
        return ReadyCounts(self.read())

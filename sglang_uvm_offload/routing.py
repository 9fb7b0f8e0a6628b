"""Counting which experts the router picked, on the device that computes, inside CUDA graphs too.

For each layer and phase two counts an expert: *routed* tokens, and *touches*, the steps that used the expert, counted once
however many tokens they sent to it. A touch of an offloaded expert in decode is one read of its weights over PCIe.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

ROUTED, TOUCHES = 0, 1
ALL_ROWS = 1 << 40
"""More rows than a step has: every row counts."""


class Phase(enum.IntEnum):
    PREFILL = 0
    DECODE = 1


class IdFormat(enum.Enum):
    """How expert ids lie in a ``[rows, top_k]`` tensor: one a number, or packed ``id << 16 | weight``."""

    PLAIN = "plain"
    PACKED = "packed"


@dataclass(frozen=True)
class RoutingCounts:
    """Counts since the start: ``counts[layer, phase, kind, expert]`` (int64, kind ROUTED or TOUCHES) and ``steps[phase]``."""

    counts: np.ndarray
    steps: tuple[int, int]

    def since(self, earlier: RoutingCounts) -> RoutingCounts:
        return RoutingCounts(
            self.counts - earlier.counts,
            (self.steps[0] - earlier.steps[0], self.steps[1] - earlier.steps[1]),
        )

    def routed(self) -> np.ndarray:
        """``[layer, expert]``: routed tokens in both phases."""
        return self.counts[:, :, ROUTED].sum(axis=1)

    def touches(self) -> np.ndarray:
        """``[layer, expert]``: touches in both phases."""
        return self.counts[:, :, TOUCHES].sum(axis=1)


class AskedCounts(Protocol):
    """Counts on their way from the device. Any thread may use it."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> RoutingCounts:
        """The counts of all steps that were launched when they were asked for, and of no others."""


class RoutingCounters(Protocol):
    """The counters of one model's MoE layers. ``num_experts`` is the largest number of local experts of any layer."""

    num_layers: int
    num_experts: int

    def begin_step(self, rows: int, phase: Phase) -> None:
        """The layers that run from now on belong to a step of ``phase`` of which the first ``rows`` rows are tokens and
        the rest padding; 0 rows: a dummy or capture run, which does not count."""

    def count(self, layer: int, ids: torch.Tensor, first_expert: int, id_format: IdFormat) -> None:
        """Count ``ids[rows, top_k]`` for row ``layer``. The id ``first_expert`` is local expert 0; ids outside the layer (-1,
        other ranks' experts) do not count."""

    def count_histogram(self, layer: int, histogram: torch.Tensor) -> None:
        """Count a step for which only tokens an expert (int32 ``[num_experts]``) are known."""

    def read(self) -> RoutingCounts:
        """The counts after everything queued so far; waits for the device."""

    def ask(self) -> AskedCounts:
        """Ask for the counts of all steps launched so far, without waiting. Call it between steps, outside any capture."""


@dataclass(frozen=True)
class Here:
    """``AskedCounts`` that are there."""

    counts: RoutingCounts

    def ready(self) -> bool:
        return True

    def wait(self) -> RoutingCounts:
        return self.counts


class CpuRoutingCounters:
    """``RoutingCounters`` for a model that computes on the CPU. Small NumPy calls cost a tenth of what PyTorch's do."""

    def __init__(self, num_layers: int, num_experts: int):
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._counts = np.zeros((num_layers, 2, 2, num_experts), dtype=np.int64)
        self._steps = [0, 0]
        self._rows, self._phase = 0, Phase.PREFILL

    def begin_step(self, rows: int, phase: Phase) -> None:
        self._rows, self._phase = rows, phase
        self._steps[phase] += rows > 0

    def count(self, layer: int, ids: torch.Tensor, first_expert: int, id_format: IdFormat) -> None:
        local = ids.numpy()[: self._rows].ravel()
        if id_format is IdFormat.PACKED:
            local = local >> 16
        local = local - first_expert
        local = local[(local >= 0) & (local < self.num_experts)]
        if local.size:
            self._add(layer, np.bincount(local, minlength=self.num_experts))

    def count_histogram(self, layer: int, histogram: torch.Tensor) -> None:
        if self._rows:
            self._add(layer, np.pad(histogram.numpy(), (0, self.num_experts - histogram.numel())))

    def _add(self, layer: int, histogram: np.ndarray) -> None:
        counts = self._counts[layer, self._phase]
        counts[ROUTED] += histogram
        counts[TOUCHES] += histogram > 0

    def read(self) -> RoutingCounts:
        return RoutingCounts(self._counts.copy(), (self._steps[0], self._steps[1]))

    def ask(self) -> AskedCounts:
        return Here(self.read())

"""Counting the router's choices on the compute device, inside CUDA graphs too.

Each layer and phase has two counts per expert: *routed* tokens, and *activations*, the steps that read the expert in place,
for any number of tokens. A decode activation of an offloaded expert is one read of its weights over PCIe. A step that streams
computes from a copy of each layer's experts in VRAM, so it reads no expert in place and counts only routed tokens.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

ROUTED, ACTIVATIONS = 0, 1
SLOT_TOKENS, SLOT_HITS, SLOT_FILLS, SLOT_BROUGHT = range(4)
ALL_ROWS = 1 << 40
"""More rows than any step has, so that every row counts."""


class Phase(enum.IntEnum):
    """How a step is counted. Residents are chosen by activations per DECODE step. A step that streams has no activations, so
    it counts as PREFILL, whatever it computes."""

    PREFILL = 0
    DECODE = 1


class IdFormat(enum.Enum):
    """How expert ids are stored in a ``[rows, top_k]`` tensor: plain, or packed as ``id << 16 | weight``."""

    PLAIN = "plain"
    PACKED = "packed"


@dataclass(frozen=True)
class RoutingCounts:
    """Counts since the start: ``counts[layer, phase, kind, expert]`` (int64, kind ROUTED or ACTIVATIONS) and
    ``steps[phase]``."""

    counts: np.ndarray
    steps: tuple[int, int]
    slots: np.ndarray | None = None
    """The slots' part in these counts (``memory/slots``), int64 ``[layer, phase, kind, expert]``; None without slots.
    SLOT_TOKENS and SLOT_HITS: routed tokens and activations that an already filled slot served. SLOT_FILLS: activations that
    filled a slot. SLOT_BROUGHT: experts copied into a slot ahead of a step that streams."""

    def since(self, earlier: RoutingCounts) -> RoutingCounts:
        before = 0 if earlier.slots is None else earlier.slots  # slots are made after the counters
        return RoutingCounts(
            self.counts - earlier.counts,
            (self.steps[0] - earlier.steps[0], self.steps[1] - earlier.steps[1]),
            None if self.slots is None else self.slots - before,
        )

    def routed(self) -> np.ndarray:
        """``[layer, expert]``: routed tokens in both phases."""
        return self.counts[:, :, ROUTED].sum(axis=1)

    def activations(self) -> np.ndarray:
        """``[layer, expert]``: activations in both phases."""
        return self.counts[:, :, ACTIVATIONS].sum(axis=1)


class PendingCounts(Protocol):
    """Counts in flight from the device. Thread-safe."""

    def ready(self) -> bool:
        """Whether ``wait`` would return immediately."""

    def wait(self) -> RoutingCounts:
        """Return the counts of exactly the steps that were launched before the request."""


class RoutingCounters(Protocol):
    """The counters of one model's MoE layers. ``num_experts`` is the largest number of local experts in a layer."""

    num_layers: int
    num_experts: int

    def begin_step(self, valid_rows: int, phase: Phase) -> None:
        """Begin a step of ``phase``: the layers that run next belong to it. The first ``valid_rows`` rows of its batch are
        tokens, and the rest is padding. With 0, for a dummy or capture run, the step does not count."""

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
        """Count ``ids[rows, top_k]`` for the model's MoE layer at index ``layer``. Local expert 0 has the id ``first_expert``;
        ids outside the layer (-1, experts of other ranks) do not count. ``in_place``: whether the layer reads its experts in
        place, which counts as activations. If any layer of a step does not, the step must have begun as ``Phase.PREFILL``.
        ``lasting``: nothing overwrites ``ids`` before its memory is freed, so it may be read when the step ends."""

    def count_histogram(self, layer: int, histogram: torch.Tensor, *, in_place: bool = True) -> None:
        """``count`` for a dispatcher that exposes only the tokens per expert, int32 ``[num_experts]``."""

    def read(self) -> RoutingCounts:
        """Return the counts of all work queued so far. Waits for the device."""

    def read_async(self) -> PendingCounts:
        """Request the counts of all steps launched so far, without waiting. Call between steps, outside graph capture."""

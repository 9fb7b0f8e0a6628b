"""Counting the router's choices on the compute device, inside CUDA graphs too.

There are two counts per expert for each layer and phase: *routed* tokens, and *activations*, the steps that read the expert in
place, with any number of tokens. An activation of an offloaded expert in decode is one read of its weights over PCIe. A step
that streams computes from a copy of each layer's experts in VRAM: it reads none in place, and counts routed tokens only.
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
"""More rows than any step has: every row counts."""


class Phase(enum.IntEnum):
    """What a step counts as. Residents are chosen by the activations per DECODE step, so a step that streams is no evidence of
    those: it counts as PREFILL, whatever it computes."""

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
    """Of these, what slots did (``memory/slots``), None without slots: int64 ``[layer, phase, kind, expert]``. SLOT_TOKENS and
    SLOT_HITS are the routed tokens and the activations that a slot served which was not filled for the step; SLOT_FILLS are
    activations that filled one; SLOT_BROUGHT are experts that came into one ahead of a step that streams."""

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
    """Counts in flight from the device. Any thread may use it."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""

    def wait(self) -> RoutingCounts:
        """The counts of exactly the steps that were launched before the request."""


class RoutingCounters(Protocol):
    """The counters of one model's MoE layers. ``num_experts`` is the largest number of local experts in a layer."""

    num_layers: int
    num_experts: int

    def begin_step(self, valid_rows: int, phase: Phase) -> None:
        """The layers that run from now on belong to a step of ``phase``. The first ``valid_rows`` rows of its batch are tokens,
        the rest padding; 0: a dummy or capture run, which does not count."""

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
        """Count ``ids[rows, top_k]`` for the model's MoE layer at index ``layer``. The id ``first_expert`` is local expert 0;
        ids outside the layer (-1, other ranks' experts) do not count. ``in_place``: whether the layer reads its experts where
        they lie, which makes activations; a step of which any layer does not must have begun as ``Phase.PREFILL``.
        ``lasting``: nobody writes to the memory of ``ids`` before it is freed, so it may be read when the step ends."""

    def count_histogram(self, layer: int, histogram: torch.Tensor, *, in_place: bool = True) -> None:
        """``count`` where only tokens per expert (int32 ``[num_experts]``) are known."""

    def read(self) -> RoutingCounts:
        """The counts after everything queued so far; waits for the device."""

    def read_async(self) -> PendingCounts:
        """Request the counts of all steps launched so far, without waiting. Call it between steps, outside any capture."""

"""The ``ExpertSlots`` protocol: extra rows next to the experts of a model's layers, resolved and filled within a step.

A *slot* is a row in VRAM behind the rows of a layer's experts, in each of its tensors. Two modules implement the protocol:
``cuda/slots`` (a kernel that a graph captures with its layer) and ``cpu/slots`` (``policy/slot_policy`` itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


MAX_TENSORS, MAX_EXPERTS = 16, 1024
"""The most tensors of a layer, and the most experts, and slots, of it."""
MAX_REQUESTS = 256
"""The most requests of a prefill that are looked at."""


class Rows(NamedTuple):
    """A tensor with one row an expert, and behind them one a slot. ``address``: of row 0."""

    address: int
    nbytes: int
    """Of a row."""


class SlotLayer(NamedTuple):
    """The slots of one layer: ``num_slots`` rows from row ``num_experts`` on, in each of the tensors."""

    rows: Sequence[Rows]
    num_experts: int
    num_slots: int


class ExpertSlots(Protocol):
    """The slots of one model. Ids and residency are those of local experts. All but ``resolve`` and ``keep`` is called between
    steps, outside any capture, in the order of the steps. No call waits for the device."""

    def begin_step(self, ends: Sequence[int] | None = None) -> None:
        """A step begins, after the counters' ``begin_step``. ``ends``, of a prefill: behind the last row of each prompt that
        ends in it, ascending; None in a decode step. Of more than ``MAX_REQUESTS`` the last ones count."""

    def resolve(self, layer: int, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        """Serve the layer at index ``layer`` in a step with the experts ``ids[rows, top_k]``. In ``blocks`` (int32: the expert
        of each ``block_size`` of the first ``padded[0]`` rows that are computed, -1 for none) replace each expert that a slot
        holds by the slot's row. Slots are filled first, by a prefill with what the tails of its requests use. What ran
        while no step was begun (capture) resolves nothing."""

    def keep(self, layer: int, ids: torch.Tensor, copies: Sequence[int]) -> None:
        """The layer at index ``layer`` computes a prefill from copies of its experts in VRAM, which have their rows at the
        addresses ``copies``, one for each of the layer's ``rows``: fill slots from there. Not for a capture."""

    def slot_of(self, layer: int) -> torch.Tensor | None:
        """int32 ``[num_experts]`` on the device: the slot that holds each expert of a layer, plus one; 0: none. As of now, in
        stream order. None for a layer without slots."""

    def reset(self) -> None:
        """The slots hold nothing: bytes of experts may have changed since the last step."""

    def set_share(self, share: np.ndarray) -> None:
        """How much of each expert is offloaded from now on: uint8 ``[layers, experts]``, 0 (nothing, and it gets no slot) to
        ``policy.slot_policy.WHOLE``."""

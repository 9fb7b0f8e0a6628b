"""The ``ExpertSlots`` protocol: rows in VRAM that hold copies of experts, resolved and filled within a step.

Layers of one shape share a *pool* of slots: rows that lie behind the experts of all of them, at the stride of each of their
tensors. Two modules implement the protocol: ``cuda/slots`` (a kernel that a graph captures with its layer) and ``cpu/slots``
(``policy/slot_policy`` itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


MAX_TENSORS, MAX_EXPERTS = 16, 1024
"""The most tensors of a layer, and the most experts of it."""
MAX_POOL_EXPERTS = 1 << 17
"""The most experts of the layers that share a pool, each layer's rounded up to a multiple of 16."""
MAX_REQUESTS = 256
"""The most requests of a prefill that are looked at."""


class Rows(NamedTuple):
    """A tensor with one row an expert. ``address``: of the layer's first row."""

    address: int
    nbytes: int
    """Of a row."""


class SlotLayer(NamedTuple):
    """One layer with slots: slot ``s`` of its pool is row ``first_slot + s`` of each of the tensors."""

    rows: Sequence[Rows]
    num_experts: int
    pool: int
    """Its index among the model's pools."""
    first_slot: int


class ExpertSlots(Protocol):
    """The slots of one model, made from its layers (``SlotLayer``, or None for a layer without slots) in the order of a step,
    and the number of slots of each pool. Ids and residency are those of local experts. All but ``resolve`` and what
    brings experts is called between steps, outside any capture, in the order of the steps. No call waits for the device."""

    def begin_step(self, ends: Sequence[int] | None = None, *, brings: bool = False) -> None:
        """A step begins, after the counters' ``begin_step``. ``ends``, of a prefill: behind the last row of each prompt that
        ends in it, ascending; None in a decode step. Of more than ``MAX_REQUESTS`` the last ones count. ``brings``: whether
        experts are brought for the step, so that misses fill no slots, and what was brought counts as no hit."""

    def resolve(self, layer: int, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        """Serve the layer at index ``layer`` in a step with the experts ``ids[rows, top_k]``. In ``blocks`` (int32: the expert
        of each ``block_size`` of the first ``padded[0]`` rows that are computed, -1 for none) replace each expert that a slot
        holds by the slot's row. Slots are filled first, by a prefill with what the tails of its requests use. What ran
        while no step was begun (capture) resolves nothing."""

    def may_bring(self) -> bool:
        """Whether the calling stream may wait for copies: not while it captures a graph."""

    def bring(self, layer: int, beside: int | None) -> None:
        """Begin to bring all offloaded experts of the layer at index ``layer`` into slots, for a step that was begun so, after
        all that the calling stream has been given. ``beside``: the layer that is computed next, which keeps its slots. What was
        brought before has been awaited. Not for a capture. Raises ``ManagedMemoryError``; what cannot come is then in no
        slot."""

    def await_brought(self) -> None:
        """What the calling stream is given from now on comes after all that is being brought."""

    def reset(self) -> None:
        """The slots hold nothing: bytes of experts may have changed since the last step."""

    def set_share(self, share: np.ndarray) -> None:
        """How much of each expert is offloaded from now on: uint8 ``[layers, experts]``, 0 (nothing, and it gets no slot) to
        ``policy.slot_policy.WHOLE``."""

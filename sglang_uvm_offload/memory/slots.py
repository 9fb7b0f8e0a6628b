"""The ``ExpertSlots`` protocol: rows in VRAM that hold copies of experts, resolved and filled within a step.

Layers of one shape share a *pool* of slots: rows after the experts of all of them, at the stride of each of their tensors. Two
modules implement the protocol: ``cuda/slots`` (a kernel that is captured with its layer) and ``cpu/slots`` (which runs
``policy/slot_policy`` directly).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch


MAX_TENSORS, MAX_EXPERTS = 16, 1024
"""The most tensors and the most experts of a layer."""
MAX_POOL_EXPERTS = 1 << 17
"""The most experts of all layers that share a pool, with each layer rounded up to a multiple of 16."""
MAX_REQUESTS = 256
"""The most requests of a prefill that are considered."""
MAX_ALIGNED = 64
"""The most ids that ``ExpertSlots.resolve`` aligns."""
AHEAD_ROWS = 2
"""The most experts of a layer that are copied ahead of its routing. If copying one takes half of a layer's compute time, more
cannot arrive in time (benchmarks/results/lookahead/steps.md)."""
MAX_GUESSES = 256
"""The most ids of a ``Guess``."""

Requests = Sequence[tuple[int, int]]
"""The ``[begin, end)`` rows of each request that ends in a prefill, in row order."""


class Rows(NamedTuple):
    """A tensor with one row per expert. ``address`` is that of the layer's first row."""

    address: int
    nbytes: int
    """Bytes per row."""


class SlotLayer(NamedTuple):
    """One layer with slots: slot ``s`` of its pool is row ``first_slot + s`` of each of the tensors."""

    rows: Sequence[Rows]
    num_experts: int
    pool: int
    """The pool's index in the model."""
    first_slot: int


class BlockLists(NamedTuple):
    """An aligner's lists: rows grouped into blocks of one expert each. int32."""

    blocks: torch.Tensor
    """The expert of each block, -1 for none."""
    padded: torch.Tensor
    """``[1]``: the number of rows in blocks. ``[2]``, only for lists that ``resolve`` makes: also the number of blocks without
    an expert."""
    block_size: int
    """Rows per block."""
    read_rows: int = 0
    """Rows computed per zero-copy read of an expert; 0 means ``block_size``."""
    order: torch.Tensor | None = None
    """If given, ``resolve`` makes the lists from at most ``MAX_ALIGNED`` ids (if it ``aligns``). Receives the index into the
    ids of each row of the blocks; the number of ids marks a padding row."""


NO_TENSORS: frozenset[int] = frozenset()


class Guess(NamedTuple):
    """A guess of the experts that a layer will use, made before its router runs."""

    logits: Callable[[], torch.Tensor]
    """Computes router logits from the previous layer's input."""
    experts: Callable[[torch.Tensor], torch.Tensor]
    """Maps the logits to int32 or int64 expert ids ``[rows, n]``, likeliest first, in the model's numbering."""
    first_expert: int
    """The model's number of the layer's first local expert."""


class Gain(NamedTuple):
    """What lookahead achieved, in experts."""

    misses: int
    """Misses of the layers that lookahead serves."""
    brought: int
    """Experts copied ahead, at least in part."""
    right: int
    """Copied experts that were then missed."""


def turns(slots: int) -> int:
    """The number of a pool's slots reserved for lookahead. Layers take turns: one computes from its half while the next one's
    experts arrive in the other. 0 for small pools, which lose more than they gain."""
    return 2 * AHEAD_ROWS if slots >= 32 * AHEAD_ROWS else 0


class ExpertSlots(Protocol):
    """The slots of one model.

    Constructed from its layers in forward order (``SlotLayer``, or None for a layer without slots), the number of slots per
    pool, and whether to look ahead. Ids and residency refer to local experts. ``layer`` arguments are indices into the layers.

    ``resolve``, ``look_ahead``, ``end_layer``, ``bring`` and the ``await_`` methods are called within steps. All others are
    called between steps, outside graph capture, in step order. Only ``gain`` waits for the device. "Await" means that work
    enqueued later on the calling stream waits.
    """

    aligns: bool
    """Whether ``resolve`` can make lists."""

    def begin_step(self, requests: Requests | None = None, *, brings: bool = False) -> None:
        """Begin a step, after the counters' ``begin_step``. ``requests`` are a prefill's, None for a decode step; only the last
        ``MAX_REQUESTS`` count. With ``brings``, the step streams experts into slots: misses fill no slots, and streamed experts
        do not count as hits."""

    def resolve(self, layer: int, ids: torch.Tensor, lists: BlockLists, later: frozenset[int] = NO_TENSORS) -> None:
        """Replace experts that have a slot by the slot's row in the ``lists`` of a layer that uses the experts
        ``ids[rows, top_k]``. Makes the lists first if they have an ``order``. Fills slots with missed experts first; a prefill
        fills them with what the last tokens of its requests use. Resolves nothing outside of steps (during capture).
        ``later`` are addresses of tensors that are read only after the next ``await_fills``."""

    def await_fills(self) -> bool:
        """Await all pending fills. Returns whether there were any."""

    def may_bring(self) -> bool:
        """Whether the calling stream may wait for copies, that is, it is not capturing a graph."""

    def bring(self, layer: int, beside: int | None) -> None:
        """Start copying all offloaded experts of a layer into slots, after the work enqueued on the calling stream. Only for a
        step begun with ``brings``, outside capture, and after awaiting the previous layer's. The layer ``beside`` computes next
        and keeps its slots. Raises ``ManagedMemoryError``; experts that could not be copied are then in no slot."""

    def await_brought(self) -> None:
        """Await all copies started by ``bring``."""

    def look_ahead(self, layer: int, guess: Guess) -> None:
        """Start copying guessed experts of a layer into spare rows, until ``layer`` is resolved in the same step. Copied
        experts that the layer then misses need no fill. Call this after resolving the previous layer and before awaiting its
        fills. Does nothing without lookahead, or if the layers cannot overlap. Raises what ``guess`` raises."""

    def end_layer(self, layer: int) -> None:
        """Await what was copied ahead for a layer, whether it was resolved or not."""

    def gain(self) -> Gain | None:
        """The gain over all decode steps so far; None without lookahead. Waits for the device."""

    def reset(self) -> None:
        """Invalidate all slots, because expert weights may have changed since the last step."""

    def set_share(self, share: np.ndarray) -> None:
        """Set how much of each expert is offloaded: uint8 ``[layers, experts]`` from 0 (nothing, so it gets no slot) to
        ``policy.slot_policy.WHOLE``."""

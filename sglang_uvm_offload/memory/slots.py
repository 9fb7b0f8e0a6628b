"""The ``ExpertSlots`` protocol: rows in VRAM that hold copies of experts, resolved and filled within a step.

Layers of one shape share a *pool* of slots: rows that lie behind the experts of all of them, at the stride of each of their
tensors. Two modules implement the protocol: ``cuda/slots`` (a kernel that a graph captures with its layer) and ``cpu/slots``
(``policy/slot_policy`` itself).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
MAX_ALIGNED = 64
"""The most ids that ``ExpertSlots.resolve`` aligns."""
AHEAD_ROWS = 2
"""The most experts of a layer that come ahead of its routing. More cannot come while a layer computes if one takes half as long
(benchmarks/results/lookahead/steps.md)."""
MAX_GUESSES = 256
"""The most ids of a ``Guess``."""

Requests = Sequence[tuple[int, int]]
"""Of each request that ends in a prefill, in the order of its rows: the first row and the one behind the last."""


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


class BlockLists(NamedTuple):
    """Rows that are computed in blocks of one expert each. int32."""

    blocks: torch.Tensor
    """The expert of each block, -1 for none."""
    padded: torch.Tensor
    """``[1]`` rows in blocks. ``[2]``, of lists that are made: and the blocks without an expert."""
    block_size: int
    """Rows."""
    read_rows: int = 0
    """How many rows of an expert are computed by one read of it in place; 0: those of a block."""
    order: torch.Tensor | None = None
    """Lists that are to be made of at most ``MAX_ALIGNED`` ids, where slots ``align``: the place in the ids of each row of the
    blocks, their number where there is none."""


NO_TENSORS: frozenset[int] = frozenset()


class Guess(NamedTuple):
    """Which experts a layer will use, before its own router tells."""

    logits: Callable[[], torch.Tensor]
    """Reads what the layer before is computed from."""
    experts: Callable[[torch.Tensor], torch.Tensor]
    """Of the logits: int32 or int64 ``[rows, n]``, the likeliest of each row first, in the model's numbers of experts."""
    first_expert: int
    """The number of the layer's first one."""


class Gain(NamedTuple):
    """What came ahead, in experts."""

    misses: int
    """Of the layers that may be looked ahead for."""
    brought: int
    """At least in part."""
    right: int
    """Of those that were brought, the misses."""


def turns(slots: int) -> int:
    """How many of a pool's slots hold what comes ahead, so that layers take turns: one is computed from its own while the next
    one's come. None of few slots, which lose more by it."""
    return 2 * AHEAD_ROWS if slots >= 32 * AHEAD_ROWS else 0


class ExpertSlots(Protocol):
    """The slots of one model, made from its layers (``SlotLayer``, or None for a layer without slots) in the order of a step,
    the number of slots of each pool, and whether they look ahead. Ids and residency are those of local experts. All but
    ``resolve``, ``look_ahead``, ``end_layer`` and what brings experts or awaits them is called between steps, outside any
    capture, in the order of the steps. No call but ``gain`` waits for the device."""

    aligns: bool
    """Whether ``resolve`` can make lists."""

    def begin_step(self, requests: Requests | None = None, *, brings: bool = False) -> None:
        """A step begins, after the counters' ``begin_step``. ``requests``: of a prefill; None in a decode step. Of more than
        ``MAX_REQUESTS`` the last ones count. ``brings``: whether experts are brought for the step, so that misses fill no
        slots, and what was brought counts as no hit."""

    def resolve(self, layer: int, ids: torch.Tensor, lists: BlockLists, later: frozenset[int] = NO_TENSORS) -> None:
        """Serve the layer at index ``layer`` in a step with the experts ``ids[rows, top_k]``: make the lists if they have an
        order, and replace each expert of a block that a slot holds by the slot's row. Slots are filled first, by a prefill
        with what the tails of its requests use. What ran while no step was begun (capture) resolves nothing. ``later``:
        addresses of tensors that are read only after the next ``await_fills``."""

    def await_fills(self) -> bool:
        """What the calling stream is given from now on comes after all that slots are being filled with. Whether there was
        anything."""

    def may_bring(self) -> bool:
        """Whether the calling stream may wait for copies: not while it captures a graph."""

    def bring(self, layer: int, beside: int | None) -> None:
        """Begin to bring all offloaded experts of the layer at index ``layer`` into slots, for a step that was begun so, after
        all that the calling stream has been given. ``beside``: the layer that is computed next, which keeps its slots. What was
        brought before has been awaited. Not for a capture. Raises ``ManagedMemoryError``; what cannot come is then in no
        slot."""

    def await_brought(self) -> None:
        """What the calling stream is given from now on comes after all that is being brought."""

    def look_ahead(self, layer: int, guess: Guess) -> None:
        """Begin to copy experts of the layer at index ``layer`` to where no slot's are, beside the layer that was resolved last
        and is to await its fills, until ``layer`` is resolved in the same step: what it misses and has come then need not be
        brought. Does nothing where slots do not look ahead, or not beside that layer. Raises what ``guess`` raises."""

    def end_layer(self, layer: int) -> None:
        """What the calling stream is given from now on comes after what was copied for the layer at index ``layer``, whether
        it was resolved or not."""

    def gain(self) -> Gain | None:
        """Of decode steps so far; None where slots do not look ahead. Waits for the device."""

    def reset(self) -> None:
        """The slots hold nothing: bytes of experts may have changed since the last step."""

    def set_share(self, share: np.ndarray) -> None:
        """How much of each expert is offloaded from now on: uint8 ``[layers, experts]``, 0 (nothing, and it gets no slot) to
        ``policy.slot_policy.WHOLE``."""

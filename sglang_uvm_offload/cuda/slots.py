"""``memory.slots.ExpertSlots`` on a GPU: one kernel a layer, captured into CUDA graphs with the rest of the step.

It reads the ids, the residency and the policy's state from fixed addresses, so a graph captured once does what is right at each
replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.cuda.structs import ENDS_PROCESS, AheadState, CudaFailure, PoolState, SlotState, SlotStep
from sglang_uvm_offload.memory.protocol import Span
from sglang_uvm_offload.memory.slots import (
    AHEAD_ROWS,
    MAX_EXPERTS,
    MAX_REQUESTS,
    NO_TENSORS,
    BlockLists,
    Gain,
    Guess,
    Requests,
    SlotLayer,
    turns,
)
from sglang_uvm_offload.memory.staging import LINK_BLOCKS
from sglang_uvm_offload.policy.slot_policy import NOT_HELD, assumed_counts

PROGRAMMATIC = (9, 0)
"""The first GPUs that start a kernel before the one in front of it has ended (CUDA Programming Guide, Programmatic Dependent
Launch)."""
_TAKEN_BYTES = 16
"""An int32, and what aligns the next pool."""


class CudaSlots:
    """``layers``: None for a layer without slots. ``slots``: of each pool. ``ahead``: whether to look ahead."""

    aligns = True

    def __init__(
        self,
        counters: CudaRoutingCounters,
        layers: Sequence[SlotLayer | None],
        slots: Sequence[int],
        *,
        ahead: bool = False,
    ):
        device = counters.control.device
        self._ops = device_ops(device.index)
        self._step = SlotStep(counters.control, torch.zeros(1 + 2 * MAX_REQUESTS, dtype=torch.int32).to(device))
        self._share = torch.zeros(len(layers), counters.num_experts, dtype=torch.uint8).to(device)
        served = [[(i, layer) for i, layer in enumerate(layers) if layer and layer.pool == pool] for pool in range(len(slots))]
        shapes = [(len(each), _width([layer for _, layer in each], self._ops.pool_chunk)) for each in served]
        self._nothing = _nothing_held(shapes).to(device)
        self._held = self._nothing.clone()
        """What slots hold: the state of all pools."""
        self._states: dict[int, SlotState] = {}
        counts = counters.slot_counts()
        kept = [turns(count) if ahead else 0 for count in slots]
        slots = [count - rows for count, rows in zip(slots, kept, strict=True)]
        self._gain = torch.zeros(self._ops.gain_kinds, dtype=torch.int64).to(device) if any(kept) else None
        for pool, each, rows in zip(_pools(self._held, shapes, slots), served, kept, strict=True):
            words = torch.zeros(2, self._ops.ahead_words, dtype=torch.int64).to(device)
            for at, (i, layer) in enumerate(each):
                # Nothing comes before the first layer.
                turn = self._turn(pool, at % 2, words[at % 2]) if rows and i else None
                self._states[i] = self._state(layer, pool, at, self._share[i], counts[i], turn)
        events, uses = assumed_counts()
        start = np.concatenate([[0], events, uses, np.zeros_like(events)]).astype(np.int32)
        self._table = torch.from_numpy(start).to(device)
        self._ops.check_slot_table(self._table)
        counters.slot_table = self._table
        self.overlaps = True
        """Whether kernels start before their predecessors have ended, and a second stream fills what is read later."""
        self._programmatic = torch.cuda.get_device_capability(device) >= PROGRAMMATIC
        self._resolved: int | None = None
        """The layer that was resolved last, since the step began."""
        self._brought = torch.zeros(1 + 2 * MAX_EXPERTS, dtype=torch.int32).to(device)
        """The experts that were brought last, and their slots: read by the copy until it is awaited."""
        self.link_blocks = LINK_BLOCKS
        # As for stream buffers, of a high priority: the few blocks of a copy start when some block of another kernel ends.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._filling = False
        """Whether the calling stream has yet to wait for fills."""
        self._forked: torch.cuda.Event | None = None
        """What it waits for then."""
        self._ahead: int | None = None
        """The layer that was looked ahead for last, while nothing waits for its copies."""

    def _turn(self, pool: PoolState, turn: int, words: torch.Tensor) -> AheadState:
        assert self._gain is not None
        own = torch.zeros(1 + AHEAD_ROWS + self._ops.ahead_blocks, dtype=torch.int32).to(words.device)
        return AheadState(pool.num_slots + turn * AHEAD_ROWS, own[:1], own[1:], words, self._gain)

    def _state(
        self,
        layer: SlotLayer,
        pool: PoolState,
        at: int,
        share: torch.Tensor,
        counts: torch.Tensor,
        ahead: AheadState | None,
    ) -> SlotState:
        known = torch.zeros(5, layer.num_experts, dtype=torch.int32).to(share.device)
        work = torch.zeros(2 + 1 + 2 * self._ops.max_fills, dtype=torch.int32).to(share.device)
        return SlotState(
            rows=list(layer.rows),
            num_experts=layer.num_experts,
            pool=pool,
            at=at,
            first_slot=layer.first_slot,
            last=known[0],
            lately=known[1],
            long=known[2],
            classes=known[3:],
            turn=work[:2],
            fills=work[2:],
            share=share,
            came=torch.zeros(layer.num_experts, dtype=torch.uint8).to(share.device),
            counts=counts,
            ahead=ahead,
        )

    def begin_step(self, requests: Requests | None = None, *, brings: bool = False) -> None:
        if requests is not None:
            last = requests[-MAX_REQUESTS:]
            _send([len(last), *chain.from_iterable(last)], self._step.requests)
        self._step = self._step._replace(brings=brings)
        self._resolved = None

    def resolve(self, layer: int, ids: torch.Tensor, lists: BlockLists, later: frozenset[int] = NO_TENSORS) -> None:
        state = self._states.get(layer)
        if state is None or not ids.numel():
            return
        self.await_fills()
        step = self._step._replace(brings=self._brings)
        later = later if self.overlaps else NO_TENSORS
        early = self.overlaps and self._programmatic and self._resolved not in (None, layer)
        self._ops.resolve_slots(state, self._table, ids, lists, step, later, programmatic=early)
        self._resolved = layer
        if later and not step.brings:
            self._fill(state, state.fills, later)

    @property
    def _brings(self) -> bool:
        """A graph is captured between steps, whatever the last one was, and is replayed by steps that bring nothing."""
        return self._step.brings and self.may_bring()

    def await_fills(self) -> bool:
        filling, self._filling = self._filling, False
        forked, self._forked = self._forked, None
        if forked is not None:
            torch.cuda.current_stream(self._brought.device).wait_event(forked)
        return filling

    def look_ahead(self, layer: int, guess: Guess) -> None:
        state = self._states.get(layer)
        if state is None or state.ahead is None or not self._filling:
            return
        # It is joined even if the layer is not resolved, or what follows fails: a capture must end with all that it forked.
        self._ahead = layer
        with torch.cuda.stream(self._stream):
            logits = guess.logits()
            self._forked = self._stream.record_event()  # the second GEMM may write where these were read
            ids = guess.experts(logits).contiguous()
            self._ops.look_ahead(state, self._table, ids, guess.first_expert, self._step.control)

    def end_layer(self, layer: int) -> None:
        if self._ahead == layer:
            self._ahead = None
            self.await_brought()

    def gain(self) -> Gain | None:
        return None if self._gain is None else Gain(*self._gain[: len(Gain._fields)].tolist())

    def may_bring(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def bring(self, layer: int, beside: int | None) -> None:
        state = self._states[layer]
        other = None if beside is None else self._states.get(beside)
        kept = other.at if other is not None and other.pool is state.pool else -1
        try:
            self._ops.bring_slots(state, self._table, kept, self._step.control, self._brought)
            self._fill(state, self._brought, None)
            self._filling, self._forked = False, None  # ``await_brought`` awaits it
        except CudaFailure as failure:
            raise failure.on(f"the experts of layer {layer}", Span(0, 0)) from failure

    def _fill(self, state: SlotState, chosen: torch.Tensor, later: frozenset[int] | None) -> None:
        """On the other stream, after all that the calling one has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(chosen.device))
        self._filling = True
        try:
            self._ops.fill_slots(state, chosen, later, self.link_blocks, self._stream.cuda_stream)
            self._forked = self._stream.record_event()
        except CudaFailure as failure:
            self._filling = False
            self.await_brought()
            if failure.error not in ENDS_PROCESS:
                self.reset()  # the slots that were chosen hold other bytes
            raise

    def await_brought(self) -> None:
        torch.cuda.current_stream(self._brought.device).wait_stream(self._stream)

    def reset(self) -> None:
        self._held.copy_(self._nothing)

    def set_share(self, share: np.ndarray) -> None:
        _send(share, self._share)


def _width(layers: Sequence[SlotLayer], chunk: int) -> int:
    """Of ``PoolState``."""
    most = max((layer.num_experts for layer in layers), default=0)
    return -(-most // chunk) * chunk


def _nothing_held(shapes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """uint8, on the CPU: what pools hold at first, whose ``worth`` have these ``shapes``."""
    held = torch.zeros(sum(map(_pool_bytes, shapes)), dtype=torch.uint8)
    for pool in _pools(held, shapes, [0] * len(shapes)):
        pool.worth.fill_(NOT_HELD)
    return held


def _pools(held: torch.Tensor, shapes: Sequence[tuple[int, int]], slots: Sequence[int]) -> list[PoolState]:
    """The pools whose state lies in ``held``."""
    parts = held.split(list(map(_pool_bytes, shapes)))
    return [_pool(*each) for each in zip(parts, shapes, slots, strict=True)]


def _pool(held: torch.Tensor, shape: tuple[int, int], slots: int) -> PoolState:
    experts = shape[0] * shape[1]
    worth, slot_of, taken = held.split([experts, 4 * experts, _TAKEN_BYTES])
    return PoolState(slots, worth.view(shape), slot_of.view(torch.int32).view(shape), taken.view(torch.int32)[:1])


def _pool_bytes(shape: tuple[int, int]) -> int:
    return 5 * shape[0] * shape[1] + _TAKEN_BYTES


def _send(values: np.ndarray | Sequence[int], target: torch.Tensor) -> None:
    """In stream order, to the first elements of ``target``. From pinned memory, or the caller would wait for the steps before;
    torch keeps it until it was copied."""
    here = torch.as_tensor(values, dtype=target.dtype).pin_memory()
    target[: len(here)].copy_(here, non_blocking=True)

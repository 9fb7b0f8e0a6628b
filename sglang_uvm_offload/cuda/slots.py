"""``memory.slots.ExpertSlots`` on a GPU: one kernel per layer, captured into CUDA graphs with the rest of the step.

The kernel reads the ids, the residency and the policy's state from fixed addresses, so each replay of a graph sees the current
ones.
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
"""The first compute capability with Programmatic Dependent Launch: kernels may start before their predecessor ends (CUDA
Programming Guide)."""
_TAKEN_BYTES = 16
"""An int32, padded to align the next pool."""


class CudaSlots:
    """``ExpertSlots`` on a GPU. ``layers`` has None for layers without slots, ``slots`` is the number per pool, and ``ahead``
    enables lookahead."""

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
        """What the slots hold: the state of all pools."""
        self._states: dict[int, SlotState] = {}
        counts = counters.slot_counts()
        kept = [turns(count) if ahead else 0 for count in slots]
        slots = [count - rows for count, rows in zip(slots, kept, strict=True)]
        self._gain = torch.zeros(self._ops.gain_kinds, dtype=torch.int64).to(device) if any(kept) else None
        for pool, each, rows in zip(_pools(self._held, shapes, slots), served, kept, strict=True):
            words = torch.zeros(2, self._ops.ahead_words, dtype=torch.int64).to(device)
            for at, (i, layer) in enumerate(each):
                # The first layer has no predecessor to look ahead from.
                turn = self._turn(pool, at % 2, words[at % 2]) if rows and i else None
                self._states[i] = self._state(layer, pool, at, self._share[i], counts[i], turn)
        events, uses = assumed_counts()
        start = np.concatenate([[0], events, uses, np.zeros_like(events)]).astype(np.int32)
        self._table = torch.from_numpy(start).to(device)
        self._ops.check_slot_table(self._table)
        counters.slot_table = self._table
        self.overlaps = True
        """Whether kernels may start before their predecessors end, and a second stream fills what is read later."""
        self._programmatic = torch.cuda.get_device_capability(device) >= PROGRAMMATIC
        self._resolved: int | None = None
        """The last layer resolved in this step."""
        self._brought = torch.zeros(1 + 2 * MAX_EXPERTS, dtype=torch.int32).to(device)
        """The last experts brought and their slots. The copy reads this until it is awaited."""
        self.link_blocks = LINK_BLOCKS
        # High priority, as for stream buffers: a copy's few blocks start as soon as any block of another kernel ends.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._filling = False
        """Whether the calling stream still has to wait for fills."""
        self._forked: torch.cuda.Event | None = None
        """The event that it has to wait for."""
        self._ahead: int | None = None
        """The layer with lookahead copies that nothing has awaited yet."""

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
        """Whether this step brings experts. Never while capturing: a graph is captured between steps, whatever the last one
        was, and replayed only by steps that bring nothing."""
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
        # Set first, so that the stream is joined even if the layer is not resolved or the code below fails: a capture must end
        # with all forked streams joined.
        self._ahead = layer
        with torch.cuda.stream(self._stream):
            logits = guess.logits()
            self._forked = self._stream.record_event()  # the second GEMM may overwrite the input of the logits
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
        """Fill slots on the other stream, after the work enqueued on the calling one."""
        self._stream.wait_stream(torch.cuda.current_stream(chosen.device))
        self._filling = True
        try:
            self._ops.fill_slots(state, chosen, later, self.link_blocks, self._stream.cuda_stream)
            self._forked = self._stream.record_event()
        except CudaFailure as failure:
            self._filling = False
            self.await_brought()
            if failure.error not in ENDS_PROCESS:
                self.reset()  # the chosen slots hold other bytes
            raise

    def await_brought(self) -> None:
        torch.cuda.current_stream(self._brought.device).wait_stream(self._stream)

    def reset(self) -> None:
        self._held.copy_(self._nothing)

    def set_share(self, share: np.ndarray) -> None:
        _send(share, self._share)


def _width(layers: Sequence[SlotLayer], chunk: int) -> int:
    """W of ``PoolState``."""
    most = max((layer.num_experts for layer in layers), default=0)
    return -(-most // chunk) * chunk


def _nothing_held(shapes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The initial state of pools whose ``worth`` have these ``shapes``: uint8 on the CPU."""
    held = torch.zeros(sum(map(_pool_bytes, shapes)), dtype=torch.uint8)
    for pool in _pools(held, shapes, [0] * len(shapes)):
        pool.worth.fill_(NOT_HELD)
    return held


def _pools(held: torch.Tensor, shapes: Sequence[tuple[int, int]], slots: Sequence[int]) -> list[PoolState]:
    """The pools whose state is in ``held``."""
    parts = held.split(list(map(_pool_bytes, shapes)))
    return [_pool(*each) for each in zip(parts, shapes, slots, strict=True)]


def _pool(held: torch.Tensor, shape: tuple[int, int], slots: int) -> PoolState:
    experts = shape[0] * shape[1]
    worth, slot_of, taken = held.split([experts, 4 * experts, _TAKEN_BYTES])
    return PoolState(slots, worth.view(shape), slot_of.view(torch.int32).view(shape), taken.view(torch.int32)[:1])


def _pool_bytes(shape: tuple[int, int]) -> int:
    return 5 * shape[0] * shape[1] + _TAKEN_BYTES


def _send(values: np.ndarray | Sequence[int], target: torch.Tensor) -> None:
    """Copy ``values`` to the first elements of ``target`` in stream order. From pinned memory, or the caller would wait for
    earlier steps; torch keeps that memory until the copy is done."""
    here = torch.as_tensor(values, dtype=target.dtype).pin_memory()
    target[: len(here)].copy_(here, non_blocking=True)

"""``memory.slots.ExpertSlots`` on a GPU: one kernel a layer, captured into CUDA graphs with the rest of the step.

It reads the ids, the residency and the policy's state from fixed addresses, so a graph captured once does what is right at each
replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.cuda.structs import SlotState, SlotStep
from sglang_uvm_offload.memory.slots import MAX_REQUESTS, SlotLayer
from sglang_uvm_offload.policy.slot_policy import assumed_counts


class CudaSlots:
    """``layers``: None for a layer without slots."""

    def __init__(self, counters: CudaRoutingCounters, layers: Sequence[SlotLayer | None]):
        device = counters.control.device
        self._ops = device_ops(device.index)
        self._step = SlotStep(counters.control, torch.zeros(1 + MAX_REQUESTS, dtype=torch.int32).to(device))
        self._layers = layers
        self._states: dict[int, SlotState] = {}
        width, most = counters.num_experts, max((layer.num_slots for layer in layers if layer), default=0)
        self._share = torch.zeros(len(layers), width, dtype=torch.uint8).to(device)
        self._held = torch.zeros(len(layers), width + most, dtype=torch.int32).to(device)
        """What slots hold: of each layer ``SlotState.slot_of``, then ``owner``."""
        self._nothing = self._held.clone()
        counts = counters.slot_counts()
        for index, layer in enumerate(layers):
            if layer is not None:
                self._states[index] = self._state(layer, self._held[index], self._share[index], counts[index])
        events, uses = assumed_counts()
        start = np.concatenate([[0], events, uses, np.zeros_like(events)]).astype(np.int32)
        self._table = torch.from_numpy(start).to(device)
        self._ops.check_slot_table(self._table)

    def _state(self, layer: SlotLayer, held: torch.Tensor, share: torch.Tensor, counts: torch.Tensor) -> SlotState:
        experts = layer.num_experts
        known = torch.zeros(5, experts, dtype=torch.int32).to(share.device)
        work = torch.zeros(2 + 1 + 2 * self._ops.max_fills, dtype=torch.int32).to(share.device)
        return SlotState(
            rows=list(layer.rows),
            slot_of=held[:experts],
            owner=held[experts : experts + layer.num_slots],
            last=known[0],
            lately=known[1],
            long=known[2],
            classes=known[3:],
            turn=work[:2],
            fills=work[2:],
            share=share,
            counts=counts,
        )

    def begin_step(self, ends: Sequence[int] | None = None) -> None:
        if ends is not None:
            last = ends[-MAX_REQUESTS:]
            _send([len(last), *last], self._step.ends)
        self._ops.begin_slots(self._table)

    def resolve(self, layer: int, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        state = self._states.get(layer)
        if state is not None and ids.numel():
            self._ops.resolve_slots(state, self._table, ids, blocks, padded, block_size, self._step)

    def keep(self, layer: int, ids: torch.Tensor, copies: Sequence[int]) -> None:
        state = self._states.get(layer)
        if state is not None and ids.numel():
            self._ops.keep_in_slots(state, self._table, ids, copies, self._step)

    def slot_of(self, layer: int) -> torch.Tensor | None:
        state = self._states.get(layer)
        return None if state is None else state.slot_of

    def reset(self) -> None:
        self._held.copy_(self._nothing)

    def set_share(self, share: np.ndarray) -> None:
        _send(share, self._share)


def _send(values: np.ndarray | Sequence[int], target: torch.Tensor) -> None:
    """In stream order, to the first elements of ``target``. From pinned memory, or the caller would wait for the steps before;
    torch keeps it until it was copied."""
    here = torch.as_tensor(values, dtype=target.dtype).pin_memory()
    target[: len(here)].copy_(here, non_blocking=True)

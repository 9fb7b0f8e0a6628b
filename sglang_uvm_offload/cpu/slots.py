"""``memory.slots.ExpertSlots`` for a model that computes on the CPU: the policy itself, and copies at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.memory.slots import SlotLayer
from sglang_uvm_offload.policy.slots import EMPTY, SlotPolicy
from sglang_uvm_offload.routing.counts import SLOT_FILLS, SLOT_HITS, SLOT_TOKENS, Phase


class CpuSlots:
    """``layers``: None for a layer without slots. All others have as many."""

    def __init__(self, counters: CpuRoutingCounters, layers: Sequence[SlotLayer | None]):
        self._counters = counters
        self._layers = layers
        width = counters.num_experts
        present = np.array([np.arange(width) < (layer.num_experts if layer else 0) for layer in layers])
        self._share: np.ndarray = np.zeros(present.shape, dtype=np.int64)
        (slots,) = {layer.num_slots for layer in layers if layer}
        self.policy = SlotPolicy(present, slots)

    def begin_step(self) -> None:
        self.policy.begin_step()

    def resolve(self, layer: int, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if not valid or mine is None:
            return
        routed: np.ndarray = ids[:valid].flatten().numpy()
        tokens = np.bincount(routed[(routed >= 0) & (routed < mine.num_experts)], minlength=self._share.shape[1])
        hit = (tokens > 0) & (self.policy.slot_of[layer] != EMPTY)
        counts: np.ndarray = self._counters.slot_counts()[layer, int(phase)]
        counts[SLOT_TOKENS] += tokens * hit
        counts[SLOT_HITS] += hit
        if phase is Phase.DECODE:
            rows = slice(layer, layer + 1)
            for _, expert, slot in self.policy.resolve(tokens[None] > 0, self._share[rows], rows).fills:
                counts[SLOT_FILLS, expert] += 1
                for address, nbytes in mine.rows:
                    ctypes.memmove(address + (mine.num_experts + slot) * nbytes, address + expert * nbytes, nbytes)
        used = blocks[: int(padded[0]) // block_size]
        slot_of = torch.from_numpy(self.policy.slot_of[layer])
        slots = torch.where(used >= 0, slot_of[used.clamp(min=0).long()], EMPTY)
        used.copy_(torch.where(slots != EMPTY, mine.num_experts + slots, used))

    def reset(self) -> None:
        self.policy.reset()

    def set_share(self, share: np.ndarray) -> None:
        self._share = share.astype(np.int64)

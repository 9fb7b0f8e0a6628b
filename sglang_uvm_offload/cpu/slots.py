"""``memory.slots.ExpertSlots`` for a model that computes on the CPU: the policy itself, and copies at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.memory.slots import MAX_REQUESTS, SlotLayer
from sglang_uvm_offload.policy.slot_policy import EMPTY, TAIL, Resolved, SlotPolicy, Tails
from sglang_uvm_offload.routing.counts import SLOT_FILLS, SLOT_HITS, SLOT_KEPT, SLOT_STREAMED, SLOT_TOKENS, Phase


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
        self._ends: Sequence[int] = ()

    def begin_step(self, ends: Sequence[int] | None = None) -> None:
        self.policy.begin_step()
        if ends is not None:
            self._ends = ends[-MAX_REQUESTS:]

    def resolve(self, layer: int, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if not valid or mine is None:
            return
        routed: np.ndarray = ids[:valid].flatten().numpy()
        tokens = np.bincount(routed[(routed >= 0) & (routed < mine.num_experts)], minlength=self._share.shape[1])
        if phase is Phase.DECODE:
            rows = slice(layer, layer + 1)
            resolved = self.policy.resolve(tokens[None] > 0, self._share[rows], rows)
        else:
            resolved = self._resolve_prefill(layer, ids[:valid], tokens > 0)
        counts: np.ndarray = self._counters.slot_counts()[layer, int(phase)]
        counts[SLOT_TOKENS] += tokens * resolved.hit[0]
        counts[SLOT_HITS] += resolved.hit[0]
        self._fill(mine, resolved, [row.address for row in mine.rows], counts[SLOT_FILLS])
        used = blocks[: int(padded[0]) // block_size]
        slot_of = torch.from_numpy(self.policy.slot_of[layer])
        slots = torch.where(used >= 0, slot_of[used.clamp(min=0).long()], EMPTY)
        used.copy_(torch.where(slots != EMPTY, mine.num_experts + slots, used))

    def keep(self, layer: int, ids: torch.Tensor, copies: Sequence[int]) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if valid and mine is not None:
            counts: np.ndarray = self._counters.slot_counts()[layer, int(phase)]
            offloaded = self.policy.present[layer] & (self._share[layer] > 0)
            counts[SLOT_STREAMED] += offloaded & (self.policy.slot_of[layer] == EMPTY)
            resolved = self._resolve_prefill(layer, ids[:valid], np.zeros(self._share.shape[1], dtype=bool))
            self._fill(mine, resolved, copies, counts[SLOT_KEPT])

    def _resolve_prefill(self, layer: int, ids: torch.Tensor, read: np.ndarray) -> Resolved:
        mine, rows = self._layers[layer], slice(layer, layer + 1)
        assert mine is not None
        tails = Tails.of(ids.numpy(), self._ends, mine.num_experts)
        beside = self._share.shape[1] - mine.num_experts
        tails = Tails(np.pad(tails.distance, (0, beside), constant_values=TAIL)[None], np.pad(tails.rate, (0, beside))[None])
        return self.policy.resolve_prefill(read[None], tails, self._share[rows], rows)

    @staticmethod
    def _fill(layer: SlotLayer, resolved: Resolved, copies: Sequence[int], counts: np.ndarray) -> None:
        for _, expert, slot in resolved.fills:
            counts[expert] += 1
            for (address, nbytes), copy in zip(layer.rows, copies, strict=True):
                ctypes.memmove(address + (layer.num_experts + slot) * nbytes, copy + expert * nbytes, nbytes)

    def slot_of(self, layer: int) -> torch.Tensor | None:
        mine = self._layers[layer]
        return None if mine is None else torch.from_numpy(self.policy.slot_of[layer, : mine.num_experts] + 1).int()

    def reset(self) -> None:
        self.policy.reset()

    def set_share(self, share: np.ndarray) -> None:
        self._share = share.astype(np.int64)

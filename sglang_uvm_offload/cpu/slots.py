"""``memory.slots.ExpertSlots`` for a model that computes on the CPU: the policy itself, and copies at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.memory.slots import MAX_REQUESTS, NO_TENSORS, BlockLists, Requests, SlotLayer
from sglang_uvm_offload.policy.slot_policy import EMPTY, TAIL, Resolved, SlotPolicy, SlotPool, Tails
from sglang_uvm_offload.routing.counts import SLOT_BROUGHT, SLOT_FILLS, SLOT_HITS, SLOT_TOKENS, Phase


class CpuSlots:
    """``layers``: None for a layer without slots. ``slots``: of each pool."""

    aligns = False

    def __init__(self, counters: CpuRoutingCounters, layers: Sequence[SlotLayer | None], slots: Sequence[int]):
        self._counters = counters
        self._layers = layers
        width = counters.num_experts
        present = np.array([np.arange(width) < (layer.num_experts if layer else 0) for layer in layers])
        self._share: np.ndarray = np.zeros(present.shape, dtype=np.int64)
        pools = [
            SlotPool([at for at, layer in enumerate(layers) if layer and layer.pool == pool], count)
            for pool, count in enumerate(slots)
        ]
        self.policy = SlotPolicy(present, pools)
        self._requests: Requests = ()
        self._brings = False
        self._came = np.zeros(present.shape, dtype=bool)
        """Whether an expert was brought for the last step for which any were."""

    def begin_step(self, requests: Requests | None = None, *, brings: bool = False) -> None:
        self.policy.begin_step()
        self._brings = brings
        if requests is not None:
            self._requests = requests[-MAX_REQUESTS:]

    def resolve(self, layer: int, ids: torch.Tensor, lists: BlockLists, later: frozenset[int] = NO_TENSORS) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if not valid or mine is None:
            return
        routed: np.ndarray = ids[:valid].flatten().numpy()
        tokens = np.bincount(routed[(routed >= 0) & (routed < mine.num_experts)], minlength=self._share.shape[1])
        again = tokens[None] > (lists.read_rows or lists.block_size)
        if phase is Phase.DECODE:
            rows = slice(layer, layer + 1)
            resolved = self.policy.resolve(tokens[None] > 0, self._share[rows], rows, again=again, fill=not self._brings)
        else:
            resolved = self._resolve_prefill(layer, ids[:valid], tokens > 0, again)
        counts: np.ndarray = self._counters.slot_counts()[layer, int(phase)]
        held = resolved.hit[0] & ~self._came[layer] if self._brings else resolved.hit[0]
        counts[SLOT_TOKENS] += tokens * held
        if not self._brings:
            counts[SLOT_HITS] += held
        self._fill(mine, [(expert, slot) for _, expert, slot in resolved.fills], counts[SLOT_FILLS])
        used = lists.blocks[: int(lists.padded[0]) // lists.block_size]
        slot_of = torch.from_numpy(self.policy.slot_of[layer])
        slots = torch.where(used >= 0, slot_of[used.clamp(min=0).long()], EMPTY)
        used.copy_(torch.where(slots != EMPTY, mine.first_slot + slots, used))

    def await_fills(self) -> bool:
        return False

    def may_bring(self) -> bool:
        return True

    def bring(self, layer: int, beside: int | None) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if valid and mine is not None:
            self._came[layer] = self.policy.present[layer] & (self._share[layer] > 0) & (self.policy.slot_of[layer] == EMPTY)
            fills = self.policy.bring(layer, self._share[layer], beside)
            self._fill(mine, fills, self._counters.slot_counts()[layer, int(phase), SLOT_BROUGHT])

    def await_brought(self) -> None:
        """Everything has come."""

    def _resolve_prefill(self, layer: int, ids: torch.Tensor, read: np.ndarray, again: np.ndarray) -> Resolved:
        mine, rows = self._layers[layer], slice(layer, layer + 1)
        assert mine is not None
        tails = Tails.of(ids.numpy(), self._requests, mine.num_experts)
        beside = self._share.shape[1] - mine.num_experts
        tails = Tails(np.pad(tails.distance, (0, beside), constant_values=TAIL)[None], np.pad(tails.rate, (0, beside))[None])
        return self.policy.resolve_prefill(read[None], tails, self._share[rows], rows, again=again, fill=not self._brings)

    @staticmethod
    def _fill(layer: SlotLayer, fills: Sequence[tuple[int, int]], counts: np.ndarray) -> None:
        for expert, slot in fills:
            counts[expert] += 1
            for address, nbytes in layer.rows:
                ctypes.memmove(address + (layer.first_slot + slot) * nbytes, address + expert * nbytes, nbytes)

    def reset(self) -> None:
        self.policy.reset()

    def set_share(self, share: np.ndarray) -> None:
        self._share = share.astype(np.int64)

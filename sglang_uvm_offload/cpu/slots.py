"""``memory.slots.ExpertSlots`` for a model that computes on the CPU. It runs the policy itself, and copies at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.memory.slots import (
    AHEAD_ROWS,
    MAX_REQUESTS,
    NO_TENSORS,
    BlockLists,
    Gain,
    Guess,
    Requests,
    SlotLayer,
    turns,
)
from sglang_uvm_offload.policy.lookahead import likeliest
from sglang_uvm_offload.policy.slot_policy import EMPTY, MAX_FILLS, TAIL, Resolved, SlotPolicy, SlotPool, Tails
from sglang_uvm_offload.routing.counts import SLOT_BROUGHT, SLOT_FILLS, SLOT_HITS, SLOT_TOKENS, Phase


class CpuSlots:
    """``layers`` has None for each layer without slots, ``slots`` the number of slots of each pool. ``ahead``: whether to look
    ahead, which copies whole experts."""

    aligns = False

    def __init__(
        self,
        counters: CpuRoutingCounters,
        layers: Sequence[SlotLayer | None],
        slots: Sequence[int],
        *,
        ahead: bool = False,
    ):
        self._counters = counters
        self._layers = layers
        width = counters.num_experts
        present = np.array([np.arange(width) < (layer.num_experts if layer else 0) for layer in layers])
        self._share: np.ndarray = np.zeros(present.shape, dtype=np.int64)
        self._kept = [turns(count) if ahead else 0 for count in slots]
        pools = [
            SlotPool([at for at, layer in enumerate(layers) if layer and layer.pool == pool], count - kept)
            for pool, (count, kept) in enumerate(zip(slots, self._kept, strict=True))
        ]
        self._came_ahead: dict[int, list[tuple[int, int]]] = {}
        """For each layer that is not yet resolved: the experts that were copied ahead in this step, and their slots."""
        self._resolved = np.zeros(len(layers), dtype=np.int64)
        """The step in which each layer was last resolved."""
        self._gain = Gain(0, 0, 0)
        self.policy = SlotPolicy(present, pools)
        self._requests: Requests = ()
        self._brings = False
        self._came = np.zeros(present.shape, dtype=bool)
        """Whether each expert was brought for the last step for which any experts were."""

    def begin_step(self, requests: Requests | None = None, *, brings: bool = False) -> None:
        self.policy.begin_step()
        self._came_ahead = {}
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
        missed = (tokens > 0) & self._offloaded(layer)
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
        decodes = phase is Phase.DECODE and not self._brings
        slot_of = torch.from_numpy(self._use_ahead(layer, missed & decodes, len(resolved.fills)))
        slots = torch.where(used >= 0, slot_of[used.clamp(min=0).long()], EMPTY)
        used.copy_(torch.where(slots != EMPTY, mine.first_slot + slots, used))

    def await_fills(self) -> bool:
        return False

    def look_ahead(self, layer: int, guess: Guess) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if not valid or phase is not Phase.DECODE or self._brings or mine is None or not layer or not self._kept[mine.pool]:
            return
        pool = self.policy.pools[mine.pool]
        turn = list(pool.layers).index(layer) % 2
        for other in [each for each in self._came_ahead if each in pool.layers and list(pool.layers).index(each) % 2 == turn]:
            del self._came_ahead[other]
        ids = guess.experts(guess.logits())[:valid].numpy() - guess.first_expert
        late = self._resolved[layer] == self.policy.now
        experts = [] if late else likeliest(ids, self._offloaded(layer), AHEAD_ROWS)
        first = pool.slots + turn * AHEAD_ROWS
        self._came_ahead[layer] = [(expert, first + nth) for nth, expert in enumerate(experts)]
        self._copy(mine, self._came_ahead[layer])

    def end_layer(self, layer: int) -> None:
        """Nothing to do: everything is already copied."""

    def gain(self) -> Gain | None:
        return self._gain if any(self._kept) else None

    def _offloaded(self, layer: int) -> np.ndarray:
        """``bool[experts]``: the offloaded experts that are in no slot."""
        missing: np.ndarray = self.policy.present[layer] & (self._share[layer] > 0) & (self.policy.slot_of[layer] == EMPTY)
        return missing

    def _use_ahead(self, layer: int, missed: np.ndarray, fills: int) -> np.ndarray:
        """The slot from which each expert is computed. ``missed``: the experts that were in no slot before this step's
        ``fills``."""
        slot_of = self.policy.slot_of[layer].copy()
        self._resolved[layer] = self.policy.now
        misses, brought, right = self._gain
        for expert, slot in (came := self._came_ahead.get(layer, ())):
            if missed[expert] and (slot_of[expert] != EMPTY or fills < MAX_FILLS):
                right += 1
                if slot_of[expert] == EMPTY:
                    slot_of[expert] = slot
                    fills += 1
        self._gain = Gain(misses + int(missed.sum()) * (layer > 0), brought + len(came), right)
        return slot_of

    def may_bring(self) -> bool:
        return True

    def bring(self, layer: int, beside: int | None) -> None:
        valid, phase = self._counters.step
        mine = self._layers[layer]
        if valid and mine is not None:
            self._came[layer] = self._offloaded(layer)
            fills = self.policy.bring(layer, self._share[layer], beside)
            self._fill(mine, fills, self._counters.slot_counts()[layer, int(phase), SLOT_BROUGHT])

    def await_brought(self) -> None:
        """Nothing to do: everything is already here."""

    def _resolve_prefill(self, layer: int, ids: torch.Tensor, read: np.ndarray, again: np.ndarray) -> Resolved:
        mine, rows = self._layers[layer], slice(layer, layer + 1)
        assert mine is not None
        tails = Tails.of(ids.numpy(), self._requests, mine.num_experts)
        beside = self._share.shape[1] - mine.num_experts
        tails = Tails(np.pad(tails.distance, (0, beside), constant_values=TAIL)[None], np.pad(tails.rate, (0, beside))[None])
        return self.policy.resolve_prefill(read[None], tails, self._share[rows], rows, again=again, fill=not self._brings)

    def _fill(self, layer: SlotLayer, fills: Sequence[tuple[int, int]], counts: np.ndarray) -> None:
        for expert, _ in fills:
            counts[expert] += 1
        self._copy(layer, fills)

    @staticmethod
    def _copy(layer: SlotLayer, fills: Sequence[tuple[int, int]]) -> None:
        for expert, slot in fills:
            for address, nbytes in layer.rows:
                ctypes.memmove(address + (layer.first_slot + slot) * nbytes, address + expert * nbytes, nbytes)

    def reset(self) -> None:
        self.policy.reset()

    def set_share(self, share: np.ndarray) -> None:
        self._share = share.astype(np.int64)

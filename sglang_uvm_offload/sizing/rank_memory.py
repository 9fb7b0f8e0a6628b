"""Bytes of VRAM and host RAM that each rank takes, and whether a machine has them."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from functools import cached_property

from sglang_uvm_offload.sizing.checkpoint_shape import LayerShape
from sglang_uvm_offload.sizing.host_need import HostNeed
from sglang_uvm_offload.sizing.kv_cache import DTYPE_BYTES
from sglang_uvm_offload.sizing.lookup_tables import MANAGED
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.plan import RankMemory
from sglang_uvm_offload.sizing.rank_experts import RankExperts
from sglang_uvm_offload.sizing.rates import stream_rates
from sglang_uvm_offload.sizing.routing_curves import HitRates, hit_rates
from sglang_uvm_offload.sizing.slots import NO_SLOTS, Slots
from sglang_uvm_offload.sizing.stage_cost import StageCost, Stream
from sglang_uvm_offload.sizing.streaming import MOST_BUFFERS, break_even_tokens, buffers_in
from sglang_uvm_offload.sizing.verdict import LEAST_RESIDENTS
from sglang_uvm_offload.sizing.vocabulary import head_ranks


@dataclasses.dataclass(frozen=True)
class Case(RankExperts):
    """One input of the planner. Methods with a ``stage`` are about one rank of that pipeline stage. Ranks of a stage are equal;
    of expert-parallel ones, it is the one that takes most. ``rows`` are the residents and slots of a layer, all in VRAM."""

    def stream_buffers(self, stage: int, rows: int) -> int:
        """Stream buffers per rank: the requested number, or as many as fit on every rank with ``rows`` if a chunk would use
        them."""
        most = MOST_BUFFERS if self.streams(rows) else 0
        room = next((count for count in range(most, 0, -1) if self.in_vram(rows, count)), 0)
        return self._buffers(stage, rows, room)

    def _buffers(self, stage: int, rows: int, chosen: int) -> int:
        """Those that were asked for, else ``chosen``; with every expert resident none, because nothing streams."""
        if rows == self.model.num_experts:
            return 0
        given = self.reserve.stream_gb
        return chosen if given is None else buffers_in(given, self.stream_layer_bytes(stage))

    def stream_bytes(self, stage: int, rows: int) -> int:
        return self.stream_buffers(stage, rows) * self.stream_layer_bytes(stage)

    def stream(self, rows: int) -> Stream:
        """How prefill streams. The stage with fewest buffers stands for all."""
        stages = [stage for stage in range(self.parallel.pp) if self.placed[stage]]
        buffers = min((self.stream_buffers(stage, rows) for stage in stages), default=0)
        return Stream(buffers, self.stream_tokens(rows))

    def stream_tokens(self, rows: int) -> int:
        """From how many tokens on prefill streams."""
        if self.reserve.stream_tokens is not None:
            return self.reserve.stream_tokens
        rates = stream_rates(self.machine, self.parallel, self.assumed)
        return break_even_tokens(self.model.num_experts, self.model.top_k, rows, rates)

    def streams(self, rows: int) -> bool:
        """Whether the longest chunk does."""
        return self.defaults.chunked_prefill_size >= self.stream_tokens(rows)

    @cached_property
    def kv_tokens(self) -> int:
        """Slots of KV cache that a rank needs."""
        return self.workload.tokens_of_rank(self.parallel)

    @property
    def requests_of_rank(self) -> int:
        return self.workload.requests_of_rank(self.parallel)

    def kv_token_bytes(self, stage: int) -> float:
        kv, itemsize = self.model.kv, DTYPE_BYTES[self.workload.kv_cache_dtype]
        one = kv.layer_bytes(self.parallel.attn_tp, itemsize)
        drafts = one * len(self.drafts())
        return kv.pool_bytes(self.stages[stage], self.parallel.attn_tp, itemsize) + drafts

    def kv_bytes(self, stage: int) -> int:
        """The KV cache that the workload needs, and the table of each request's slots (4 bytes a token of context)."""
        table = 4 * self.requests_of_rank * self.workload.context_length
        return int(self.kv_tokens * self.kv_token_bytes(stage)) + table

    def hicache_bytes(self, stage: int, rows: int) -> int:
        """Host RAM of the hierarchical cache. Its ratio is to the KV cache that SGLang makes: of all that is left over, or of
        the tokens that a flag gives."""
        if not self.reserve.hicache_ratio:
            return self.reserve.hicache_bytes
        left = max(0, self.left_in_vram(stage, rows)) if self.workload.fills_vram else 0
        return int(self.reserve.hicache_ratio * (self.kv_bytes(stage) + left))

    def left_in_vram(self, stage: int, rows: int) -> int:
        """What is left of one rank's budget after all that it counts, below 0 if that is more."""
        return self._room[stage] - self._placed_bytes(stage, rows, self.stream_buffers(stage, rows))

    @cached_property
    def fixed_bytes(self) -> list[int]:
        """For each stage, the VRAM of one rank other than placed experts, slots and stream buffers."""
        driver = self.assumed.driver_batch_mib << 20
        return [
            self.plain_bytes(stage) + self.table_bytes(stage) + self.kv_bytes(stage) + driver
            for stage in range(self.parallel.pp)
        ]

    def rank(self, stage: int, rows: int) -> RankMemory:
        residents, experts, drafted = self.residents_of(rows), self.model.num_experts, self.draft_residents
        drafts = [self.draft_offloaded_bytes(n if stage == self.parallel.pp - 1 else experts) for n in (drafted, 0)]
        moe = [layer for layer in self.decoder_layers(stage) if layer.experts]
        return RankMemory(
            stage=stage,
            layers=len(self.stages[stage]),
            moe_layers=len(moe),
            resident_experts=self.local(residents) * len(moe),
            plain_weights=self.plain_bytes(stage),
            table_bytes=self.table_bytes(stage),
            resident_bytes=self.resident_bytes(stage, rows),
            slot_bytes=self.slot_bytes(stage, rows),
            stream_buffers=self.stream_buffers(stage, rows),
            stream_bytes=self.stream_bytes(stage, rows),
            kv_bytes=self.kv_bytes(stage),
            driver_bytes=self.assumed.driver_batch_mib << 20,
            budget_bytes=self.budget,
            host_bytes=self.offloaded_bytes(stage, residents) + drafts[0],
            host_bytes_after_moves=self.offloaded_bytes(stage, 0 if 0 < residents < experts else residents)
            + drafts[0 < drafted < experts],
        )

    def host_need(self, rows: int, after_moves: bool = False) -> HostNeed:
        """Host RAM that all ranks need, and the margin that offloading leaves free."""
        p = self.parallel
        ranks = (self.rank(stage, rows) for stage in range(p.pp))
        experts = sum(r.host_bytes_after_moves if after_moves else r.host_bytes for r in ranks)
        cache = sum(self.hicache_bytes(stage, rows) for stage in range(p.pp))
        alike = p.tp * p.replicas
        processes = int(self.assumed.process_gib * GIB) * p.ranks
        managed = self.tables_in == MANAGED
        return HostNeed(experts * alike, cache * alike, processes, self.table_host_bytes, tables_are_managed=managed)

    def host(self, rows: int, after_moves: bool) -> int:
        return self.host_need(rows, after_moves).total

    def host_room(self, rows: int) -> int:
        """Host RAM for this launch: where GPU and CPU have one memory, what the GPUs leave of it."""
        host = self.machine.host_bytes
        return min(host, self.machine.pool_bytes - self.gpus_take(rows)) if self.machine.one_memory else host

    def gpus_take(self, rows: int) -> int:
        """VRAM of all ranks, with what SGLang and the headroom leave for other uses of it."""
        p, kept = self.parallel, self.free_vram - self.budget
        return sum(kept + self.rank(stage, rows).used_bytes for stage in range(p.pp)) * p.tp * p.replicas

    # Choosing

    def in_vram(self, rows: int, buffers: int = 0) -> bool:
        """Whether every rank holds its residents and slots with the stream buffers that were asked for, or with ``buffers``
        if their number is free."""
        return all(self._placed_bytes(stage, rows, buffers) <= room for stage, room in enumerate(self._room))

    def _placed_bytes(self, stage: int, rows: int, buffers: int) -> int:
        streaming = self._buffers(stage, rows, buffers) * self.stream_layer_bytes(stage)
        return self.resident_bytes(stage, rows) + self.slot_bytes(stage, rows) + streaming

    @cached_property
    def _room(self) -> list[int]:
        """For each stage, the budget of one rank for placed experts, slots and stream buffers."""
        return [self.budget - fixed for fixed in self.fixed_bytes]

    def in_host(self, rows: int) -> bool:
        return self.host(rows, after_moves=False) <= self.host_room(rows)

    def most_in_vram(self, buffers: int = 0) -> int | None:
        """The most rows that VRAM holds, as ``in_vram`` counts, None if it is too small even without any. VRAM use grows
        monotonically with the rows, but for all experts, which need no stream buffers."""
        if self.in_vram(self.model.num_experts):
            return self.model.num_experts
        low, high = -1, self.model.num_experts - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.in_vram(middle, buffers) else (low, middle - 1)
        return low if low >= 0 else None

    def preferred(self) -> int | None:
        """The rows to choose: the most that VRAM holds with two stream buffers; with one or none if two leave too few rows
        to be useful, or too many experts for host RAM; with none if no chunk would use them. None if VRAM is too small even
        without any."""
        for buffers in range(MOST_BUFFERS, 0, -1):
            most = self.most_in_vram(buffers)
            few = most is None or most < LEAST_RESIDENTS * self.model.top_k or not self.in_host(most)
            if most is not None and not few and self.streams(most):
                return most
        return self.most_in_vram()

    def largest(self) -> int | None:
        """The preferred rows, None if host RAM cannot hold the rest. Host RAM use only shrinks with the rows, so if the most do
        not fit, no fewer do."""
        chosen = self.preferred()
        return chosen if chosen is not None and self.in_host(chosen) else None

    def with_slots_that_fit(self) -> Case:
        """The same, with a number in place of ``auto`` where its share does not fit: the most slots with which enough experts
        are resident for host RAM to hold the rest; 0 if none help, and where VRAM is too small for any."""
        if self.slots.asked is not None:
            return self
        chosen = self.largest()
        if chosen is not None:
            return self if self.slots_of(chosen) else dataclasses.replace(self, slots=NO_SLOTS)
        fewer = [dataclasses.replace(self, slots=Slots(number)) for number in range(self.model.num_experts)]
        return fewer[max(0, bisect_left(fewer, True, key=lambda case: case.largest() is None) - 1)]

    # What it reads and computes

    def measured_hit_rates(self, rows: int, requests: int) -> HitRates:
        """What residents and slots serve of measured routing."""
        slot_share = self.slots_of(rows) / rows if rows else 0.0
        return hit_rates(self.model.family, requests, rows / self.model.num_experts, slot_share)

    def cost(self, stage: int) -> StageCost:
        p, layers = self.parallel, self.decoder_layers(stage)
        embedding = self.embedding_bytes if stage == 0 and self.model.head else 0
        drafts = self.draft_experts_in_vram()
        residents, served = self.draft_residents, 1.0
        if self.offloads_drafts:
            served = hit_rates(self.model.family, self.workload.requests, residents / self.model.num_experts, 0.0).lowest.rate
        kv = self.model.kv.read_bytes(
            self.stages[stage], p.attn_tp, DTYPE_BYTES[self.workload.kv_cache_dtype], self.workload.context_length
        )
        beside = sum(self._draft_bytes(layer) for layer in self.drafts())
        # Drafts are computed where the last layer is, and read the head for each token that they draft.
        drafting = self.drafts() if stage == p.pp - 1 else ()
        return StageCost(
            layers=len(layers),
            dense_bytes=self.plain_bytes(stage) - embedding - drafts - beside,
            dense_flops=2 * sum(layer.parameters for layer in layers) / p.tp,
            expert_layers=tuple(sum(n for n, _ in self.expert_tensors(layer)) for layer in layers if layer.experts),
            expert_flops=2 * self.model.expert_parameters / p.moe_tp,
            kv_read_bytes=kv,
            latent_attention=bool(self.model.kv.latent),
            gemm_rate=2.0 if self.model.quantization == "fp8" else 1.0,
            draft_layers=len(drafting),
            draft_bytes=beside + -(-(self.model.head or self.model.embedding) // head_ranks(p)),
            draft_expert_bytes=sum(n for layer in drafting for n, _ in self.expert_tensors(layer)),
            draft_residents=residents,
            draft_hit_rate=served,
        )

    def _draft_bytes(self, layer: LayerShape) -> int:
        """The weights of a draft layer other than its routed experts, on one rank."""
        p = self.parallel
        keys_values = -(-layer.keys_values // min(p.attn_tp, self.model.kv.heads))
        return -(-layer.attention // p.attn_tp) + keys_values + -(-layer.feed_forward // p.tp) + layer.replicated

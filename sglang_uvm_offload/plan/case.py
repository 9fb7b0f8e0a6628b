"""One planning case: estimates the numbers that each rank of a launch would measure, and divides its memory with
``residency.budget``, as a launch does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from sglang_uvm_offload.config import slot_problems
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plan.kv_cache import DTYPE_BYTES, STATE_SHARE, STATES_OF_REQUEST
from sglang_uvm_offload.plan.lookup_tables import MANAGED
from sglang_uvm_offload.plan.machine import GIB, Machine
from sglang_uvm_offload.plan.model_shape import LayerShape
from sglang_uvm_offload.plan.outcome import RankMemory
from sglang_uvm_offload.plan.rank_weights import RankWeights
from sglang_uvm_offload.plan.rates import stream_rates
from sglang_uvm_offload.plan.routing_curves import HitRates, hit_rates
from sglang_uvm_offload.plan.speed import SpeedModel
from sglang_uvm_offload.plan.stage_cost import StageCost, Stream
from sglang_uvm_offload.plan.streaming import break_even_tokens
from sglang_uvm_offload.residency.budget import (
    DRIVER_BYTES,
    ONE_MEMORY,
    Asked,
    Division,
    RankBudget,
    buffers_in,
    divide,
    most_residents,
)
from sglang_uvm_offload.residency.host_need import HostNeed
from sglang_uvm_offload.residency.slot_split import Slots

_N = flag_name("num_resident")


@dataclasses.dataclass(frozen=True)
class Case(RankWeights):
    """A method that takes a ``stage`` returns figures for one rank of that pipeline stage."""

    num_resident: int | None = None
    """Resident experts per layer; None: as many as fit."""
    quantization: str | None = None
    """``--quantization`` as given, None without the flag."""

    # Dividing

    @cached_property
    def division(self) -> Division:
        """How VRAM is divided. Raises ``FlagError`` as a launch's ranks do, and if given residents leave too little KV
        cache."""
        if self.num_resident is not None and (most := self._most_beside_cache()) < self.num_resident:
            slots = self.asked.slots.asked
            beside = f" beside {slots} slots" if slots else ""
            most_fit = f"at most {most} residents{beside} fit" if most >= 0 else f"no number of residents{beside} fits"
            most_fit = ONE_MEMORY if self.machine.one_memory else most_fit
            raise FlagError(
                [
                    f"{_N} {self.num_resident}: leaves no room for a KV cache of {self.kv_tokens} tokens "
                    f"({self.asked.demand}); {most_fit}"
                ]
            )
        return divide(self.asked, self.ranks)

    def _most_beside_cache(self) -> int:
        """The most residents that fit in VRAM next to the KV cache and the requested slots and stream buffers; -1 if even 0 do
        not."""
        given, slots = self.asked.stream_gb, self.asked.slots.asked or 0
        largest = max(rank.buffer_with(slots) for rank in self.ranks)
        most = most_residents(slots, buffers_in(given, largest) if given else 0, self.ranks)
        return -1 if most is None else most

    @property
    def fits(self) -> bool:
        try:
            return self.division is not None
        except FlagError:
            return False

    def number_problems(self) -> list[str]:
        """Why the model cannot have this many residents or slots."""
        given, experts = self.num_resident, self.model.num_experts
        if given is None:
            return []
        if not 0 <= given <= experts:
            return [f"--num-resident {given}: the model has {experts} experts a layer"]
        return slot_problems(self.slots.asked or 0, given, experts)

    @cached_property
    def asked(self) -> Asked:
        longest = self.defaults.chunked_prefill_size
        return Asked(
            num_resident=self.num_resident,
            slots=self.slots if self.num_resident is None else Slots(self.slots.asked or 0),
            stream_gb=self.reserve.stream_gb,
            top_k=self.model.top_k,
            streams=lambda residents, slots: self.stream_tokens(residents, slots) <= longest,
            demand=self.workload.demand,
            cache_tokens=self.kv_tokens,
        )

    @cached_property
    def ranks(self) -> list[RankBudget]:
        """All ranks of the machine. Ranks of one pipeline stage differ only in their experts."""
        p = self.parallel
        return [rank for stage in range(p.pp) for ep_rank in range(p.ep) for rank in [self._rank(stage, ep_rank)] * self._alike]

    @property
    def _alike(self) -> int:
        """The number of ranks that hold the same layers and experts."""
        return self.parallel.moe_tp * self.parallel.replicas

    def _rank(self, stage: int, ep_rank: int) -> RankBudget:
        cache, reserve = self.kv_bytes(stage), self.reserve
        page = self.workload.page_tokens
        return RankBudget(
            name=f"a rank of pipeline stage {stage}" if self.parallel.pp > 1 else "a rank",
            free=self.budget - self.plain_bytes[stage] - self.table_bytes(stage),
            cache=cache,
            cache_of_requests=self._request_tables + (self._state_bytes(stage) if self.model.kv.state_layers else 0),
            least_cache=int(page * self.kv_token_bytes(stage)),
            experts=self.sizes(stage, ep_rank),
            buffer=self.stream_layer_bytes(stage),
            gpu=stage,
            node=0,
            host=max(0, self.machine.host_bytes - self._draft_host_bytes(self.draft_residents)),
            host_cache=reserve.hicache_bytes or int(reserve.hicache_ratio * cache),
            host_process=int(self.assumed.process_gib * GIB),
            host_tables=self.table_host_bytes // self.parallel.ranks,
            one_memory=self.machine.one_memory,
        )

    def _draft_host_bytes(self, residents: int) -> int:
        """Host RAM that the draft layers' offloaded experts take on all ranks together."""
        return self._alike * sum(self.draft_sizes(rank).offloaded[residents] for rank in range(self.parallel.ep))

    # Streaming

    def stream_tokens(self, residents: int, slots: int) -> int:
        """The smallest prefill step that streams, in tokens."""
        if self.reserve.stream_tokens is not None:
            return self.reserve.stream_tokens
        rates = stream_rates(self.machine, self.parallel, self.assumed)
        return break_even_tokens(self.model.num_experts, self.model.top_k, residents + slots, rates)

    def stream(self, division: Division) -> Stream:
        tokens = self.stream_tokens(division.num_resident, division.slots)
        return Stream(division.buffers, tokens, self.streams_into_slots(division))

    def streams_into_slots(self, division: Division) -> bool:
        """Whether streaming prefill copies experts into slots rather than buffers."""
        return self.reserve.stream_gb != 0 and all(rank.experts.streams_into(division.slots) for rank in self.ranks)

    # The KV cache

    @cached_property
    def kv_tokens(self) -> int:
        """KV cache tokens that a rank needs."""
        return self.workload.tokens_of_rank(self.parallel)

    def kv_token_bytes(self, stage: int) -> float:
        kv, itemsize = self.model.kv, DTYPE_BYTES[self.workload.kv_cache_dtype]
        one = kv.layer_bytes(self.parallel.attn_tp, itemsize)
        drafts = one * len(self.drafts())
        return kv.pool_bytes(self.stages[stage], self.parallel.attn_tp, itemsize) + drafts

    def kv_bytes(self, stage: int) -> int:
        """Bytes for the workload's KV cache, request states, and per-request tables of cache slots."""
        return int(self.kv_tokens * self.kv_token_bytes(stage)) + self._state_bytes(stage) + self._request_tables

    @property
    def _request_tables(self) -> int:
        """Bytes of the per-request tables: 4 per token of context."""
        return 4 * self._requests * self.workload.context_length

    @property
    def _requests(self) -> int:
        return self.workload.requests_of_rank(self.parallel)

    def _state_bytes(self, stage: int) -> int:
        """Bytes of the request states. SGLang splits memory between states and cache at a fixed ratio, and keeps several states
        per request."""
        one = self.model.kv.state_bytes(self.stages[stage], self.parallel.attn_tp)
        cache = self.kv_tokens * self.kv_token_bytes(stage)
        least = (STATES_OF_REQUEST * self._requests + 1) * one
        return int(max(STATE_SHARE * cache, least + least / STATE_SHARE - cache)) if one else 0

    # What a division takes

    def rank(self, stage: int, division: Division) -> RankMemory:
        """The memory of the stage's rank that uses most VRAM, with the host RAM of the rank that offloads most."""
        n, slots = division.num_resident, division.slots
        each = len(self.ranks) // self.parallel.pp
        sizes = [rank.experts for rank in self.ranks[stage * each : (stage + 1) * each]]
        most = max(sizes, key=lambda held: held.in_vram(n, slots))
        return RankMemory(
            stage=stage,
            moe_layers=sum(bool(layer.experts) for layer in self.decoder_layers(stage)),
            plain_weights=self.plain_bytes[stage],
            table_bytes=self.table_bytes(stage),
            resident_bytes=most.resident[n],
            slot_bytes=most.slots[slots],
            stream_buffers=division.buffers,
            stream_bytes=division.buffers * self.stream_layer_bytes(stage),
            streams_into_slots=self.streams_into_slots(division),
            kv_bytes=self.kv_bytes(stage),
            driver_bytes=DRIVER_BYTES,
            budget_bytes=self.budget,
            host_bytes=max(held.offloaded[n] for held in sizes),
        )

    def host_need(self, division: Division, after_moves: bool = False) -> HostNeed:
        """Host RAM that all ranks need, with the margin that offloading leaves free. ``after_moves``: the maximum it may grow
        to, because promoted experts keep their host pages."""
        n, experts = division.num_resident, self.model.num_experts
        n = 0 if after_moves and 0 < n < experts else n
        drafts = 0 if after_moves and self.draft_residents < experts else self.draft_residents
        return HostNeed(
            sum(rank.experts.offloaded[n] for rank in self.ranks) + self._draft_host_bytes(drafts),
            sum(rank.host_cache for rank in self.ranks),
            int(self.assumed.process_gib * GIB) * self.parallel.ranks,
            self.table_host_bytes,
            tables_are_managed=self.tables_in == MANAGED,
        )

    # What it reads and computes

    def measured_hit_rates(self, division: Division, requests: int) -> HitRates:
        """Hit rates of measured routing with this many residents and slots."""
        rows = division.num_resident + division.slots
        slot_share = division.slots / rows if rows else 0.0
        return hit_rates(self.model.family, requests, rows / self.model.num_experts, slot_share)

    def speed_model(self, machine: Machine | None = None) -> SpeedModel:
        """The speed model on this machine, or on another one."""
        return SpeedModel(
            *(self.model.num_experts, self.model.top_k, self.costs, machine or self.machine, self.parallel, self.assumed)
        )

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """The cost of each pipeline stage."""
        return tuple(self._costs())

    def _costs(self) -> Iterator[StageCost]:
        p, model = self.parallel, self.model
        residents, served = self.draft_residents, 1.0
        if self.offloads_drafts:
            served = hit_rates(model.family, self.workload.requests, residents / model.num_experts, 0.0).lowest.rate
        beside = sum(self._draft_bytes(layer) for layer in self.drafts())
        for stage, indices in enumerate(self.stages):
            layers = self.decoder_layers(stage)
            embedding = self.embedding_bytes if stage == 0 and model.head else 0
            # The last stage computes the drafts, and reads the LM head for each drafted token.
            drafting = self.drafts() if stage == p.pp - 1 else ()
            yield StageCost(
                layers=len(layers),
                dense_bytes=self.plain_bytes[stage] - embedding - self.draft_sizes(p.ep - 1).resident[residents] - beside,
                dense_flops=2 * sum(layer.parameters for layer in layers) / p.tp,
                expert_layers=tuple(sum(n for n, _ in self.expert_tensors(layer)) for layer in layers if layer.experts),
                expert_flops=2 * model.expert_parameters / p.moe_tp,
                kv_read_bytes=model.kv.read_bytes(
                    indices, p.attn_tp, DTYPE_BYTES[self.workload.kv_cache_dtype], self.workload.context_length
                ),
                latent_attention=bool(model.kv.latent),
                gemm_rate=2.0 if model.quantization == "fp8" else 1.0,
                draft_layers=len(drafting),
                draft_bytes=beside + -(-(model.head or model.embedding) // p.head_tp),
                draft_expert_bytes=sum(n for layer in drafting for n, _ in self.expert_tensors(layer)),
                draft_residents=residents,
                draft_hit_rate=served,
            )

    def _draft_bytes(self, layer: LayerShape) -> int:
        """Bytes of a draft layer without its routed experts, on one rank."""
        return self.attention_bytes(layer) + -(-layer.feed_forward // self.parallel.tp) + layer.replicated

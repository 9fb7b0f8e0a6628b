"""Bytes of VRAM and host RAM that each rank takes, and whether a machine has them."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, ExpertLayout, round_up, whole_blocks
from sglang_uvm_offload.sizing import sglang_memory
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape, LayerShape
from sglang_uvm_offload.sizing.draft_model import DraftModel
from sglang_uvm_offload.sizing.host_need import HostNeed
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.kv_cache import DTYPE_BYTES
from sglang_uvm_offload.sizing.linear_state import LinearState
from sglang_uvm_offload.sizing.machine import GIB, Machine
from sglang_uvm_offload.sizing.plan import RankMemory, Vram
from sglang_uvm_offload.sizing.routing_curves import HitRates, hit_rates
from sglang_uvm_offload.sizing.server_pools import ServerPools
from sglang_uvm_offload.sizing.slots import NO_SLOTS, Slots
from sglang_uvm_offload.sizing.stage_cost import StageCost, Stream
from sglang_uvm_offload.sizing.streaming import MOST_BUFFERS, break_even_tokens, buffers_in
from sglang_uvm_offload.sizing.verdict import LEAST_RESIDENTS


@dataclasses.dataclass(frozen=True)
class Case:
    """One input of the planner. Methods with a ``stage`` are about one rank of that pipeline stage. Ranks of a stage are equal;
    of expert-parallel ones, it is the one that takes most. ``rows`` are the residents and slots of a layer, all in VRAM."""

    model: CheckpointShape
    machine: Machine
    workload: Workload
    parallel: Parallel
    reserve: Reserve
    assumed: Assumptions
    draft: DraftModel | None = None
    """A draft model with a checkpoint of its own."""
    linear: LinearState | None = None
    pools: ServerPools | None = None
    """What SGLang itself makes of a launch's KV cache and states; None: the rules of ``kv_cache`` and ``linear_state``."""
    slots: Slots = NO_SLOTS
    given_stages: tuple[range, ...] = ()
    """The decoder layers of each pipeline stage of a launch, which may be divided otherwise than evenly."""
    block_bytes: int = BLOCK_BYTES
    """The memory backend's unit of residency."""

    # What SGLang grants

    @cached_property
    def defaults(self) -> sglang_memory.Defaults:
        return sglang_memory.defaults(
            self.machine.vram_bytes,
            tp=self.parallel.tp,
            pp=self.parallel.pp,
            dp_attention=self.parallel.dp if self.parallel.dp_attention else 1,
            latent_attention=bool(self.model.kv.latent),
            max_running_requests=self.workload.requests,
            chunked_prefill_size=self.reserve.chunked_prefill_size,
            cuda_graphs=self.reserve.cuda_graphs,
        )

    @cached_property
    def fraction(self) -> float:
        given = self.reserve.mem_fraction_static
        return self.defaults.mem_fraction_static if given is None else given

    @property
    def taken_before_loading(self) -> int:
        """VRAM that the server's processes take before they load the model."""
        return int((self.assumed.context_gib + (self.assumed.collectives_gib if self.parallel.ranks > 1 else 0)) * GIB)

    @property
    def free_vram(self) -> int:
        """Of one GPU, before the server's processes start. An integrated one has what is available of the host's memory, as
        SGLang sees it (``get_available_gpu_memory``)."""
        free, machine = self.reserve.free_vram_bytes, self.machine
        free = machine.vram_bytes if free is None else free
        return min(free, machine.pool_bytes) if machine.one_memory else free

    @cached_property
    def budget(self) -> int:
        """Bytes for weights and KV cache on a rank: the static fraction, less the headroom, of what is free before loading. At
        least 0: on a small GPU both factors may be negative."""
        free = self.free_vram
        granted = self.fraction - self.reserve.headroom_gb * GIB / self.machine.vram_bytes
        return max(0, int(max(0, free - self.taken_before_loading) * max(0.0, granted)) - self.reserve.image_bytes)

    @property
    def vram(self) -> Vram:
        """How a GPU is divided. A share that the GPU does not have is cut off."""
        total = self.machine.vram_bytes
        free = min(self.free_vram, total)
        runtime = min(self.taken_before_loading, free)
        images = min(self.reserve.image_bytes, free - runtime)
        rest = free - runtime - images - self.budget
        sglang = min(rest, int((free - runtime) * (1 - max(0.0, self.fraction))))
        return Vram(total - free, runtime, sglang, rest - sglang, images, self.budget)

    # What a rank holds

    @cached_property
    def stages(self) -> list[range]:
        """The decoder layers of each pipeline stage."""
        if len(self.given_stages) == self.parallel.pp:
            return list(self.given_stages)
        return sglang_memory.pipeline_stages(self.model.num_layers, self.parallel.pp)

    def decoder_layers(self, stage: int) -> list[LayerShape]:
        return [self.model.layers[index] for index in self.stages[stage]]

    def drafts(self) -> tuple[LayerShape, ...]:
        return self.model.draft_layers if self.workload.speculative else ()

    @property
    def draft_residents(self) -> int:
        """Of each draft layer, over all ranks that share it."""
        given, experts = self.workload.draft_num_resident, self.model.num_experts
        return experts if given is None else min(given, experts)

    @property
    def offloads_drafts(self) -> bool:
        return bool(self.drafts()) and self.draft_residents < self.model.num_experts

    def draft_experts_in_vram(self) -> int:
        """VRAM of the placed experts of draft layers on one rank, in whole blocks."""
        residents = self.local(self.draft_residents)
        return sum(self._layout(nbytes).budget(residents) for nbytes in self._placed_of_drafts)

    def draft_offloaded_bytes(self, residents: int) -> int:
        """Host RAM of the others, with so many ``residents`` over all ranks, on the rank with fewest of them."""
        fewest = residents // self.parallel.ep
        layouts = [self._layout(nbytes) for nbytes in self._placed_of_drafts]
        return sum(layout.budget(self.local_experts) - layout.budget(fewest) for layout in layouts)

    @property
    def _placed_of_drafts(self) -> list[int]:
        return [nbytes for layer in self.drafts() for nbytes, placed in self.expert_tensors(layer) if placed]

    def expert_tensors(self, layer: LayerShape) -> Iterator[tuple[int, bool]]:
        """(bytes of one expert on one rank, whether its experts are placed separately) for each expert tensor of the layer."""
        for part in layer.experts:
            padded = part.nbytes * self._padding() if part.name.endswith((".blocks", ".scales")) else part.nbytes
            nbytes = -(-int(padded) // (self.parallel.moe_tp if part.split else 1))
            yield nbytes, nbytes >= PAGE_BYTES

    def _padding(self) -> float:
        """The most that MXFP4 tensors grow at load: kernels round hidden units up to 128 and the hidden size to 256
        (``layers/quantization/mxfp4.py``)."""
        if self.model.quantization != "mxfp4":
            return 1.0
        size = -(-self.model.expert_size // self.parallel.moe_tp)
        return round_up(size, 128) * round_up(self.model.hidden_size, 256) / (size * self.model.hidden_size)

    @cached_property
    def local_experts(self) -> int:
        return self.model.num_experts // self.parallel.ep

    def slots_of(self, rows: int) -> int:
        return self.slots.of(rows, self.model.num_experts)

    def residents_of(self, rows: int) -> int:
        return rows - self.slots_of(rows)

    def local(self, number: int) -> int:
        """The residents, slots or rows on the rank with most of a layer's ``number``."""
        return -(-number // self.parallel.ep)

    def plain_bytes(self, stage: int) -> int:
        """VRAM beside placed experts: dense weights, and expert tensors too small to place."""
        p = self.parallel
        total = self.model.other
        layers = [*self.decoder_layers(stage), *self.drafts()]
        for layer in layers:
            keys_values = -(-layer.keys_values // min(p.attn_tp, self.model.kv.heads))
            sharing = 1 if p.shared_whole and layer.experts else p.tp
            total += -(-layer.attention // p.attn_tp) + keys_values + -(-layer.feed_forward // sharing) + layer.replicated
            total += sum(nbytes * self.local_experts for nbytes, placed in self.expert_tensors(layer) if not placed)
        total += self.draft_experts_in_vram()
        total += self.draft.rank_bytes(p.tp, p.attn_tp) if self.draft else 0
        # With DP attention, each group keeps its own vocabulary tensors.
        if stage == 0:
            total += -(-self.model.embedding // p.attn_tp)
        if stage == p.pp - 1:
            tied = self.model.embedding if p.pp > 1 and not self.model.head else 0
            total += -(-(self.model.head + tied) // p.attn_tp)
        return total

    @cached_property
    def placed(self) -> list[Counter[int]]:
        """For each stage, the tensors of placed experts: bytes of one expert on one rank -> number of tensors."""
        return [
            Counter(n for layer in self.decoder_layers(stage) for n, placed in self.expert_tensors(layer) if placed)
            for stage in range(self.parallel.pp)
        ]

    @cached_property
    def _unplaced_bytes(self) -> list[int]:
        """For each stage, one expert of all tensors too small to place, on one rank."""
        return [
            sum(n for layer in self.decoder_layers(stage) for n, placed in self.expert_tensors(layer) if not placed)
            for stage in range(self.parallel.pp)
        ]

    def resident_bytes(self, stage: int, rows: int) -> int:
        """VRAM of the residents, in whole blocks: the same for any choice of them."""
        residents = self.local(self.residents_of(rows))
        return sum(count * self._layout(n, rows).budget(residents) for n, count in self.placed[stage].items())

    def slot_bytes(self, stage: int, rows: int) -> int:
        """VRAM of the slots: whole blocks beside the experts, and rows of tensors too small to place."""
        placed = sum(count * self._layout(n, rows).slot_bytes for n, count in self.placed[stage].items())
        return placed + self.local(self.slots_of(rows)) * self._unplaced_bytes[stage]

    def offloaded_bytes(self, stage: int, num_resident: int) -> int:
        """Host RAM of the offloaded experts on the rank with fewest residents, in whole blocks."""
        residents = num_resident // self.parallel.ep
        layouts = [(self._layout(n), count) for n, count in self.placed[stage].items()]
        return sum(count * (layout.budget(self.local_experts) - layout.budget(residents)) for layout, count in layouts)

    def stream_layer_bytes(self, stage: int) -> int:
        """One stream buffer: all local experts of the largest layer, each placed tensor in whole blocks."""
        return self._stream_layer_bytes[stage]

    @cached_property
    def _stream_layer_bytes(self) -> list[int]:
        return [
            max(
                sum(whole_blocks(n * self.local_experts) for n, placed in self.expert_tensors(layer) if placed)
                for layer in self.decoder_layers(stage)
            )
            for stage in range(self.parallel.pp)
        ]

    def stream_buffers(self, stage: int, rows: int) -> int:
        """The stream buffers of a rank: those that were asked for, else as many as fit on every rank beside ``rows``."""
        room = next((count for count in range(MOST_BUFFERS, 0, -1) if self.in_vram(rows, count)), 0)
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
        return Stream(buffers, break_even_tokens(self.model.num_experts, self.model.top_k))

    def _layout(self, expert_bytes: int, rows: int = 0) -> ExpertLayout:
        return ExpertLayout(self.local_experts, expert_bytes, self.block_bytes, self.local(self.slots_of(rows)))

    @cached_property
    def kv_tokens(self) -> int:
        """Slots of KV cache that a rank needs."""
        return self.workload.tokens_of_rank(self.parallel)

    @property
    def requests_of_rank(self) -> int:
        return self.workload.requests_of_rank(self.parallel)

    @property
    def _measured(self) -> ServerPools | None:
        """The pools that SGLang makes, for these ranks."""
        return self.pools if self.pools is not None and self.pools.parallel == self.parallel else None

    def kv_token_bytes(self, stage: int) -> float:
        if self._measured is not None:
            return self._measured.token_bytes(stage)
        kv, itemsize = self.model.kv, DTYPE_BYTES[self.workload.kv_cache_dtype]
        one = kv.layer_bytes(self.parallel.attn_tp, itemsize)
        drafts = one * len(self.drafts())
        if self.draft:
            # SGLang charges the target's bytes for a draft layer, and then takes the draft's own.
            drafts += max(one, self.draft.kv.layer_bytes(self.parallel.attn_tp, itemsize)) * self.draft.layers
        return kv.pool_bytes(self.stages[stage], self.parallel.attn_tp, itemsize) + drafts

    def pool_bytes(self, stage: int, tokens: int | None = None) -> int:
        """The KV cache of ``tokens``, by default those that the workload needs; with states where SGLang was asked."""
        tokens = self.kv_tokens if tokens is None else tokens
        if self._measured is not None:
            return self._measured.nbytes(stage, tokens)
        return int(tokens * self.kv_token_bytes(stage))

    def kv_bytes(self, stage: int) -> int:
        """The pools, the states of linear attention, and the table of each request's slots (4 bytes a token of context)."""
        table = 4 * self.requests_of_rank * self.workload.context_length
        return self.pool_bytes(stage) + self.state_bytes(stage) + table

    def state_bytes(self, stage: int) -> int:
        if self.linear is None or self._measured is not None:
            return 0
        layers = len(self.model.kv.state_layers.intersection(self.stages[stage]))
        slot = layers * -(-self.linear.layer_bytes // self.parallel.attn_tp)
        return self.linear.bytes_beside(self.pool_bytes(stage), slot, self.requests_of_rank)

    def hicache_bytes(self, stage: int, rows: int) -> int:
        """Host RAM of the hierarchical cache. Its ratio is to the KV cache that SGLang makes: of all that is left over, or of
        the tokens that a flag gives."""
        if not self.reserve.hicache_ratio:
            return self.reserve.hicache_bytes
        left = max(0, self.left_in_vram(stage, rows)) if self.workload.fills_vram else 0
        return int(self.reserve.hicache_ratio * (self.kv_bytes(stage) + left))

    def left_in_vram(self, stage: int, rows: int) -> int:
        """The budget of one rank beside all that it counts, below 0 if that is more."""
        return self._room[stage] - self._placed_bytes(stage, rows, self.stream_buffers(stage, rows))

    @cached_property
    def fixed_bytes(self) -> list[int]:
        """For each stage, the VRAM of one rank beside placed experts, slots and stream buffers."""
        driver = self.assumed.driver_batch_mib << 20
        return [self.plain_bytes(stage) + self.kv_bytes(stage) + driver for stage in range(self.parallel.pp)]

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
        return HostNeed(experts * alike, cache * alike, int(self.assumed.process_gib * GIB) * p.ranks)

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
        """Whether every rank holds its residents and slots beside the stream buffers that were asked for, or beside ``buffers``
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
        """The rows to choose: the most that VRAM holds beside two stream buffers; beside one or none if two leave too few rows
        to be useful, or too many experts for host RAM. None if VRAM is too small even without any."""
        for buffers in range(MOST_BUFFERS, 0, -1):
            most = self.most_in_vram(buffers)
            if most is not None and most >= LEAST_RESIDENTS * self.model.top_k and self.in_host(most):
                return most
        return self.most_in_vram()

    def largest(self) -> int | None:
        """The preferred rows, None if host RAM cannot hold the rest. Host RAM use only shrinks with the rows, so if the most do
        not fit, no fewer do."""
        chosen = self.preferred()
        return chosen if chosen is not None and self.in_host(chosen) else None

    def with_slots_that_fit(self) -> Case:
        """The same, with a number in place of ``auto`` where its share does not fit: the most slots beside which enough experts
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
        embedding = -(-self.model.embedding // p.attn_tp) if stage == 0 and self.model.head else 0
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
            draft_bytes=beside + -(-(self.model.head or self.model.embedding) // p.attn_tp),
            draft_expert_bytes=sum(n for layer in drafting for n, _ in self.expert_tensors(layer)),
            draft_residents=residents,
            draft_hit_rate=served,
        )

    def _draft_bytes(self, layer: LayerShape) -> int:
        """The weights of a draft layer beside its routed experts, on one rank."""
        p = self.parallel
        keys_values = -(-layer.keys_values // min(p.attn_tp, self.model.kv.heads))
        return -(-layer.attention // p.attn_tp) + keys_values + -(-layer.feed_forward // p.tp) + layer.replicated

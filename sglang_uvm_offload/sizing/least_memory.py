"""The least VRAM and host RAM that a launch can take: a launch that has less certainly fails to start.

The planner rounds up, because it promises that a number fits. A refusal needs the opposite, so what is uncertain counts as
nothing here: CUDA contexts, buffers of collectives, the driver's batches, scales, padding, and towers for images; in host RAM
the processes, and blocks that offloaded experts share with residents. Certain there are the experts that are in no block of a
resident, the margin without which offloading ends a launch as it loads, a hierarchical cache of the size that a flag gives and
what SGLang keeps free as well (both checked as the cache is made, ``pool_host/base.py``), and of one that a flag gives as a
ratio, its ratio to the KV cache that the planner promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, round_up
from sglang_uvm_offload.sizing.checkpoint_shape import LayerShape
from sglang_uvm_offload.sizing.host_need import HostNeed
from sglang_uvm_offload.sizing.lookup_tables import MANAGED
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.rank_memory import Case

LEAST_TOKENS = 2
"""SGLang 0.5.23 starts with a KV cache of two tokens or more, in whole pages: it serves at most one request for two tokens
(``KVCacheConfigurator.resolve_max_num_reqs``), and refuses to serve none."""


@dataclass(frozen=True)
class LeastMemory:
    """The lower bounds of one rank of a pipeline stage. Bytes; ``page_tokens`` is SGLang's ``--page-size``."""

    case: Case
    page_tokens: int

    @property
    def tokens(self) -> int:
        """The KV cache with which SGLang starts."""
        return round_up(LEAST_TOKENS, self.page_tokens)

    def weights(self, stage: int) -> int:
        """Weights other than routed experts, plus draft layers' experts: all, or as many as the draft flag keeps resident."""
        case, p = self.case, self.case.parallel
        last = stage == p.pp - 1
        drafts = case.drafts() if last else ()
        total = sum(self._layer(layer) for layer in (*case.decoder_layers(stage), *drafts))
        total += sum(self._draft_experts(layer) for layer in drafts)
        total += case.model.embedding // p.tp if stage == 0 else 0
        total += case.table_bytes(stage)
        return total + (case.model.head // p.tp if last else 0)

    def _draft_experts(self, layer: LayerShape) -> int:
        if self.case.workload.draft_num_resident is None:
            return layer.expert_bytes // self.case.parallel.tp
        local = self.case.draft_residents // self.case.parallel.ep
        tensors = (nbytes for nbytes, placed in self._unpadded.expert_tensors(layer) if placed)
        return sum(local * nbytes // BLOCK_BYTES * BLOCK_BYTES for nbytes in tensors)

    def _layer(self, layer: LayerShape) -> int:
        p = self.case.parallel
        keys_values = layer.keys_values // min(p.attn_tp, self.case.model.kv.heads)
        whole = layer.replicated - layer.unknown
        return layer.attention // p.attn_tp + keys_values + (layer.feed_forward + layer.unknown) // p.tp + whole

    def experts(self, stage: int, rows: int) -> int:
        """Residents and slots: of each tensor that is placed by experts, the whole blocks of the driver that they fill."""
        local = self.case.local(rows)
        return sum(count * (local * n // BLOCK_BYTES * BLOCK_BYTES) for n, count in self._unpadded.placed[stage].items())

    def cache(self, stage: int) -> int:
        return self.case.pool_bytes(stage, self.tokens)

    def stream(self, stage: int, rows: int) -> int:
        """The stream buffers that were asked for. Where the launch may choose, it may do without."""
        if self.case.reserve.stream_gb is None:
            return 0
        return self.case.stream_buffers(stage, rows) * self._unpadded.stream_layer_bytes(stage)

    def needed(self, stage: int, rows: int) -> int:
        return self.weights(stage) + self.experts(stage, rows) + self.stream(stage, rows) + self.cache(stage)

    def host(self, stages: Sequence[int], rows: int) -> HostNeed:
        """Host RAM of ranks of these ``stages``, those that are on this machine."""
        return HostNeed(
            sum(self.offloaded(stage, rows) for stage in stages),
            sum(self._host_cache(stage, rows) for stage in stages),
            tables=self._host_tables * len(stages) // self.case.parallel.ranks,
            tables_are_managed=self.case.tables_in == MANAGED,
        )

    @property
    def _host_tables(self) -> int:
        """Lookup tables of all ranks, without what PyTorch rounds them up by, which a setting can turn off."""
        model, place = self.case.model, self.case.tables_in
        kept = (table.nbytes for table in model.tables if table.host_bytes(place, self.case.parallel))
        return sum(kept) * self.case.parallel.replicas

    def offloaded(self, stage: int, rows: int) -> int:
        """Experts in host RAM of the rank that has most of the residents."""
        case = self.case
        drafts = case.drafts() if stage == case.parallel.pp - 1 and case.offloads_drafts else ()
        drafted = [n for layer in drafts for n, placed in self._unpadded.expert_tensors(layer) if placed]
        out = sum(count * self._without(n, case.residents_of(rows)) for n, count in self._unpadded.placed[stage].items())
        return out + sum(self._without(n, case.draft_residents) for n in drafted)

    def _without(self, expert_bytes: int, residents: int) -> int:
        """The whole blocks of a tensor that hold no resident."""
        return (self.case.local_experts - self.case.local(residents)) * expert_bytes // BLOCK_BYTES * BLOCK_BYTES

    def _host_cache(self, stage: int, rows: int) -> int:
        reserve, case = self.case.reserve, self.case
        if not reserve.hicache_ratio:
            # Stages have caches of as many tokens, those of the stage whose tokens are largest (``sync_fixed_hicache_size``).
            largest = max(case.kv_token_bytes(each) for each in range(case.parallel.pp))
            return int(reserve.hicache_bytes * (case.kv_token_bytes(stage) / largest if largest else 1))
        made = max(0, case.pool_bytes(stage) + case.left_in_vram(stage, rows))
        return int(reserve.hicache_ratio * (made if case.workload.fills_vram else min(made, case.pool_bytes(stage))))

    @property
    def share(self) -> float:
        """SGLang's ``--mem-fraction-static`` once the headroom is taken off; nothing can be served at 0 or below."""
        return self.case.fraction - self.case.reserve.headroom_gb * GIB / self.case.machine.vram_bytes

    def granted(self, free: int, least_free: int) -> int:
        """What SGLang gives to weights and KV cache on a GPU with ``free`` bytes, where the GPU of its group with least has
        ``least_free``: it keeps a part of that for activations (``KVCacheConfigurator._profile_available_bytes``)."""
        return free - int(least_free * (1 - self.share)) - self.case.reserve.image_bytes

    def most(self) -> int | None:
        """The most residents and slots that certainly fit with the least KV cache, by the planner's upper bounds."""
        tokens = replace(self.case.workload, max_total_tokens=self.tokens)
        return replace(self.case, workload=tokens).most_in_vram()

    @cached_property
    def _unpadded(self) -> Case:
        return replace(self.case, model=replace(self.case.model, quantization="none"))

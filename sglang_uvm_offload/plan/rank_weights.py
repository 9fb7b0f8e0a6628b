"""The part of a model that each rank holds: layers, experts, and bytes of other weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cached_property

from sglang_uvm_offload.memory.layout import PAGE_BYTES, ExpertLayout, round_up, whole_blocks
from sglang_uvm_offload.plan import sglang_memory
from sglang_uvm_offload.plan.granted_vram import GrantedVram
from sglang_uvm_offload.plan.model_shape import LayerShape
from sglang_uvm_offload.residency.expert_sizes import ExpertSizes, LayerExperts, expert_sizes


@dataclasses.dataclass(frozen=True)
class RankWeights(GrantedVram):
    """The part of ``case.Case`` that covers weights."""

    @cached_property
    def stages(self) -> list[range]:
        """Decoder layer indices of each pipeline stage."""
        return sglang_memory.pipeline_stages(self.model.num_layers, self.parallel.pp)

    def decoder_layers(self, stage: int) -> list[LayerShape]:
        return [self.model.layers[index] for index in self.stages[stage]]

    def drafts(self) -> tuple[LayerShape, ...]:
        return self.model.draft_layers if self.workload.speculative else ()

    @property
    def draft_residents(self) -> int:
        """Resident experts per draft layer, on all ranks that share it together."""
        given, experts = self.workload.draft_num_resident, self.model.num_experts
        return experts if given is None else min(given, experts)

    @property
    def offloads_drafts(self) -> bool:
        return bool(self.drafts()) and self.draft_residents < self.model.num_experts

    def sizes(self, stage: int, ep_rank: int) -> ExpertSizes:
        """Sizes of the decoder layers' experts on one rank."""
        return self._sizes_of(self.decoder_layers(stage), ep_rank)

    def draft_sizes(self, ep_rank: int) -> ExpertSizes:
        return self._sizes_of(self.drafts(), ep_rank)

    def _sizes_of(self, layers: tuple[LayerShape, ...] | list[LayerShape], ep_rank: int) -> ExpertSizes:
        return expert_sizes((self._experts_of(layer, ep_rank) for layer in layers if layer.experts), self.model.num_experts)

    def _experts_of(self, layer: LayerShape, ep_rank: int) -> LayerExperts:
        placed = [nbytes for nbytes, placed in self.expert_tensors(layer) if placed]
        layouts = tuple(ExpertLayout(self.local_experts, nbytes, self.block_bytes) for nbytes in placed)
        plain = sum(nbytes for nbytes, placed in self.expert_tensors(layer) if not placed)
        return LayerExperts(layouts, self.local_experts, ep_rank, self.parallel.ep, plain)

    def expert_tensors(self, layer: LayerShape) -> Iterator[tuple[int, bool]]:
        """(bytes of one expert on one rank, whether its experts are placed separately) for each expert tensor of the layer."""
        for part in layer.experts:
            padded = part.nbytes if part.name.endswith("bias") else part.nbytes * self._padding()
            nbytes = -(-int(padded) // (self.parallel.moe_tp if part.split else 1))
            yield nbytes, nbytes >= PAGE_BYTES

    def _padding(self) -> float:
        """The largest growth of MXFP4 tensors at load: kernels round hidden units up to 128 and the hidden size to 256
        (``layers/quantization/mxfp4.py``)."""
        if self.model.quantization != "mxfp4":
            return 1.0
        size = -(-self.model.expert_size // self.parallel.moe_tp)
        return round_up(size, 128) * round_up(self.model.hidden_size, 256) / (size * self.model.hidden_size)

    @cached_property
    def local_experts(self) -> int:
        return self.model.num_experts // self.parallel.ep

    @cached_property
    def plain_bytes(self) -> list[int]:
        """For each stage, VRAM other than the decoder layers' placed experts and lookup tables: dense weights, expert tensors
        too small to place, and the draft layers."""
        return [self._plain_bytes(stage) for stage in range(self.parallel.pp)]

    def _plain_bytes(self, stage: int) -> int:
        p = self.parallel
        total = self.model.other
        for layer in [*self.decoder_layers(stage), *self.drafts()]:
            sharing = 1 if p.shared_whole and layer.experts else p.tp
            total += self.attention_bytes(layer) + -(-layer.feed_forward // sharing) + layer.replicated
            total += sum(nbytes * self.local_experts for nbytes, placed in self.expert_tensors(layer) if not placed)
        total += self.draft_sizes(p.ep - 1).resident[self.draft_residents]
        if stage == 0:
            total += self.embedding_bytes
        if stage == p.pp - 1:
            tied = self.model.embedding if p.pp > 1 and not self.model.head else 0
            total += -(-(self.model.head + tied) // p.head_tp)
        return total

    def attention_bytes(self, layer: LayerShape) -> int:
        """Bytes of the layer's attention on one rank, which holds at least one key-value head."""
        p = self.parallel
        return -(-layer.attention // p.attn_tp) + -(-layer.keys_values // min(p.attn_tp, self.model.kv.heads))

    @property
    def embedding_bytes(self) -> int:
        return -(-self.model.embedding // self.parallel.attn_tp)

    def table_bytes(self, stage: int) -> int:
        """VRAM of the lookup tables on one rank."""
        held = [table for table in self.model.tables if table.layer in self.stages[stage]]
        return sum(table.vram_bytes(self.tables_in, self.parallel) for table in held)

    @property
    def table_host_bytes(self) -> int:
        """Host RAM of the lookup tables on all ranks together."""
        return sum(table.host_bytes(self.tables_in, self.parallel) for table in self.model.tables) * self.parallel.replicas

    def stream_layer_bytes(self, stage: int) -> int:
        """One stream buffer: all local experts of the largest layer, each placed tensor in whole blocks."""
        return max(
            sum(whole_blocks(nbytes * self.local_experts) for nbytes, placed in self.expert_tensors(layer) if placed)
            for layer in self.decoder_layers(stage)
        )

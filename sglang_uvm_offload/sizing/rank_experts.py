"""What each rank holds of a model: its layers, and the bytes of its weights, experts and slots."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from sglang_uvm_offload.memory.layout import PAGE_BYTES, ExpertLayout, round_up, whole_blocks
from sglang_uvm_offload.sizing import sglang_memory
from sglang_uvm_offload.sizing.checkpoint_shape import LayerShape
from sglang_uvm_offload.sizing.granted_vram import GrantedVram
from sglang_uvm_offload.sizing.vocabulary import embedding_ranks, head_ranks


@dataclasses.dataclass(frozen=True)
class RankExperts(GrantedVram):
    """``rank_memory.Case`` without the KV cache and stream buffers, which take the rest."""

    @cached_property
    def stages(self) -> list[range]:
        """The decoder layers of each pipeline stage."""
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
        """VRAM other than placed experts and lookup tables: dense weights, and expert tensors too small to place."""
        return self._plain_bytes[stage]

    @cached_property
    def _plain_bytes(self) -> list[int]:
        return [self._plain_bytes_of(stage) for stage in range(self.parallel.pp)]

    def _plain_bytes_of(self, stage: int) -> int:
        p = self.parallel
        total = self.model.other
        layers = [*self.decoder_layers(stage), *self.drafts()]
        for layer in layers:
            keys_values = -(-layer.keys_values // min(p.attn_tp, self.model.kv.heads))
            sharing = 1 if p.shared_whole and layer.experts else p.tp
            total += -(-layer.attention // p.attn_tp) + keys_values + -(-layer.feed_forward // sharing) + layer.replicated
            total += sum(nbytes * self.local_experts for nbytes, placed in self.expert_tensors(layer) if not placed)
        total += self.draft_experts_in_vram()
        if stage == 0:
            total += self.embedding_bytes
        if stage == p.pp - 1:
            tied = self.model.embedding if p.pp > 1 and not self.model.head else 0
            total += -(-(self.model.head + tied) // head_ranks(p))
        return total

    @property
    def embedding_bytes(self) -> int:
        return -(-self.model.embedding // embedding_ranks(self.model.architectures, self.parallel))

    def table_bytes(self, stage: int) -> int:
        """VRAM of the lookup tables on one rank."""
        held = [table for table in self.model.tables if table.layer in self.stages[stage]]
        return sum(table.vram_bytes(self.tables_in, self.parallel) for table in held)

    @property
    def table_host_bytes(self) -> int:
        """Host RAM of the lookup tables, over all ranks."""
        return sum(table.host_bytes(self.tables_in, self.parallel) for table in self.model.tables) * self.parallel.replicas

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
        """VRAM of the slots: whole blocks after the experts, and rows of tensors too small to place."""
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

    def _layout(self, expert_bytes: int, rows: int = 0) -> ExpertLayout:
        return ExpertLayout(self.local_experts, expert_bytes, self.block_bytes, self.local(self.slots_of(rows)))

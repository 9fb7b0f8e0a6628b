"""What a rank measures for the division of its VRAM."""

from __future__ import annotations

import pytest
import torch

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.plugin.rank.rank_budget import beside_slots
from sglang_uvm_offload.residency.model import ModelExperts

pytestmark = pytest.mark.sglang


def test_a_layer_without_slots_needs_a_buffer_and_so_does_one_that_is_alone_in_its_pool() -> None:
    model, memory = ModelExperts(draft=False), EmulatedMemory()
    for index, pages in enumerate((1, 2, 1, 3, 3)):
        layer, module = model.add_layer(memory, LayerShard(index, 4)), torch.nn.Module()
        with AllocationMode(4, layer.allocate):
            module.w13 = torch.empty(4, pages * PAGE_BYTES, dtype=torch.uint8)
        layer.sync_tensors(module)
    layers = model.layers
    assert [layer.index for layer in beside_slots(layers, layers)] == [1]
    assert [layer.index for layer in beside_slots(layers, layers[:4])] == [1, 3, 4]
    assert beside_slots(layers, []) == layers

"""Slots behind a layer's experts: every tensor has them, they stay in VRAM, and nothing else of the layer changes."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, Draft, Rank, config, placed_layer
from builders.managers import E as MODEL_EXPERTS
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.memory import DEVICE, EmulatedMemory
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location
from sglang_uvm_offload.memory.staging import Part
from sglang_uvm_offload.residency.status import rank_status, residency_table
from sglang_uvm_offload.streaming.replicas import Replicas, buffer_bytes
from sglang_uvm_offload.units import size

E, S = 6, 3

# Experts, slots, bytes of an expert, pages of a block: with and without an edge, experts smaller and larger than a block.
COMBINATIONS = [
    (experts, slots, expert_bytes, pages)
    for experts, slots in ((1, 1), (6, 3), (5, 8))
    for expert_bytes in (PAGE_BYTES, PAGE_BYTES + 512, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 6)
    for pages in (1, 4)
]


class Module(torch.nn.Module):
    """A weight that is placed, and scales that are too small for that."""

    def __init__(self, layer, expert_bytes=PAGE_BYTES + 512):
        super().__init__()
        experts = layer.num_experts
        with AllocationMode(experts, layer.allocate):
            self.w13 = torch.nn.Parameter(torch.empty(experts, expert_bytes // 2, dtype=torch.bfloat16), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.ones(experts, 3), requires_grad=False)
            self.register_buffer("one", torch.full((experts,), 2.5))
        layer.sync_tensors(self)

    def load(self, seed=0):
        for index, parameter in enumerate(self.parameters()):
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed + index))
            parameter.data.copy_(values)


def made(experts=E, slots=S, expert_bytes=PAGE_BYTES + 512, memory=None, resident=2):
    chosen = np.arange(experts) < resident
    memory = memory or EmulatedMemory()
    layer = placed_layer(memory, LayerShard(3, experts), lambda layout: layout.holding(chosen), num_slots=slots)
    module = Module(layer, expert_bytes)
    module.load()
    return layer, module


def row(tensor, index):
    """Row ``index`` of ``tensor``, as a kernel without bounds reads it."""
    return tensor.as_strided(tensor.shape[1:], tensor.stride()[1:], tensor.storage_offset() + index * tensor.stride(0))


def fill(tensors, experts, slots):
    """Copies experts to the slots; returns what the slots hold."""
    for tensor in tensors:
        for slot in range(slots):
            row(tensor, experts + slot).copy_(tensor[(slot + 1) % experts])
    return [[row(tensor, experts + slot).clone() for slot in range(slots)] for tensor in tensors]


def in_vram(memory, managed):
    """Bytes of blocks that were placed in VRAM."""
    live = memory._find(managed)
    return int((live.placed == DEVICE).sum()) * memory.block_bytes


@pytest.mark.parametrize(("experts", "slots", "expert_bytes", "pages"), COMBINATIONS)
def test_rows_behind_the_experts_are_in_vram_and_keep_their_bytes_while_experts_move(experts, slots, expert_bytes, pages):
    memory, random = SimulatedDriver(block_bytes=pages * PAGE_BYTES), np.random.default_rng(experts)
    layer, module = made(experts, slots, expert_bytes, memory)
    tensors = [module.w13.data, module.scale.data, module.one]
    (managed,) = layer.tensors
    memory.notice_writes()
    assert memory.traffic.to_device_bytes == memory.traffic.to_host_bytes == 0, "loading moves nothing"
    assert memory.device_used == memory.device_peak
    assert not row(module.w13.data, experts).any(), "slots begin zeroed"
    held = fill(tensors, experts, slots)
    before = [tensor.clone() for tensor in tensors]
    for _ in range(30):
        layer.demote(after := random.random(managed.layout.num_extents) < random.random())
        layer.promote(after)
        assert (managed.resident == (after | managed.layout.edge)).all()
        stay = managed.layout.slot_spans + managed.layout.spans(managed.layout.edge)
        assert all(memory.location(managed.managed, span) is Location.DEVICE for span in stay)
        assert in_vram(memory, managed.managed) == layer.resident_bytes + managed.layout.slot_bytes
        known = managed.resident.copy()
        layer.reread_residency()
        assert (managed.resident == known).all()
    layer.demote(np.zeros(managed.layout.num_extents, dtype=bool))
    assert layer.resident_bytes == managed.layout.edge_bytes
    assert all(torch.equal(tensor, was) for tensor, was in zip(tensors, before, strict=True))
    rows = [[row(tensor, experts + slot) for slot in range(slots)] for tensor in tensors]
    assert all(torch.equal(a, b) for now, was in zip(rows, held, strict=True) for a, b in zip(now, was, strict=True))


def test_every_storage_is_listed_with_its_rows():
    layer, module = made()
    assert layer.slots_missing is None
    assert torch.equal(module.one, torch.full((E,), 2.5))
    assert layer.plain_bytes == E * (12 + 4), "without slots"
    assert layer.slot_rows() == [
        (module.w13.data_ptr(), PAGE_BYTES + 512),
        (module.scale.data_ptr(), 12),
        (module.one.data_ptr(), 4),
    ]
    for address, nbytes in layer.slot_rows():
        (tensor,) = (it for it in (module.w13.data, module.scale.data, module.one) if it.data_ptr() == address)
        assert tensor.untyped_storage().nbytes() == (E + S) * nbytes


def test_without_slots_nothing_has_rows():
    layer, module = made(slots=0)
    assert (layer.slot_rows(), layer.slots_missing, layer.slot_bytes) == ([], None, 0)
    assert module.scale.untyped_storage().nbytes() == E * 12
    assert module.w13.untyped_storage().nbytes() == E * (PAGE_BYTES + 512)
    assert layer.allocate(8, torch.device("cpu"), "scale") is None
    del module.scale, module.one
    layer.sync_tensors(module)
    assert (len(layer.tensors), layer.slot_rows()) == (1, [])


def test_what_a_custom_op_made_gets_rows_too():
    layer, module = made()
    old = {name: p.data.clone() for name, p in module.named_parameters()}
    generation = layer.generation
    with AllocationMode(E, layer.allocate):
        module.w13 = torch.nn.Parameter(module.w13.data.clone(), requires_grad=False)
        module.scale = torch.nn.Parameter(module.scale.data.clone(), requires_grad=False)
        module.halves = module.scale.data.view(E, 3)[:, 1:]
    assert module.scale.untyped_storage().nbytes() == E * 12
    layer.sync_tensors(module)
    gc.collect()
    assert layer.generation != generation
    assert layer.slots_missing is None
    assert dict(layer.slot_rows()) == {
        module.w13.data_ptr(): PAGE_BYTES + 512,
        module.scale.data_ptr(): 12,
        module.one.data_ptr(): 4,
    }
    assert all(torch.equal(p.data, old[name]) for name, p in module.named_parameters())
    assert module.halves.untyped_storage().data_ptr() == module.scale.data_ptr()
    assert layer.slot_bytes == layer.tensors[0].layout.slot_bytes + S * 16, "those of freed tensors are not counted"
    fill([module.w13.data, module.scale.data, module.one], E, S)


@dataclasses.dataclass
class Prepared:
    bias: torch.Tensor


MISSING = {
    "experts interleave": lambda: torch.arange(12.0).view(2, E).t(),
    "one value for all": lambda: torch.ones(1).expand(E),
    "behind something else": lambda: torch.zeros(E + 1, 4)[1:],
}


@pytest.mark.parametrize("what", MISSING)
def test_a_tensor_without_rows_is_named(what):
    layer, module = made()
    module.prepared = Prepared(MISSING[what]())
    before = module.prepared.bias
    layer.sync_tensors(module)
    assert layer.slots_missing is not None
    assert layer.slots_missing.startswith(f"prepared.bias (float32[{E}")
    assert layer.slot_rows() == []
    assert module.prepared.bias is before, "it is left alone"
    del module.prepared
    layer.sync_tensors(module)
    assert (layer.slots_missing, len(layer.slot_rows())) == (None, 3)


def test_storages_of_other_rows_than_their_tensors_are_named():
    layer, module = made()
    shared = torch.zeros(E, 8)
    module.first, module.second = shared[:, :4], shared.view(-1)[:E]
    layer.sync_tensors(module)
    assert str(layer.slots_missing).startswith("first (float32[6, 4]")
    del module.first, module.second
    module.flat = module.scale.data.view(-1)[:E]
    layer.sync_tensors(module)
    assert layer.slots_missing == "flat (float32[6])", "its rows are not those of its storage"


def test_a_storage_that_only_looks_as_if_it_had_rows_is_not_taken_for_one():
    """Whatever lies behind the experts of a tensor that somebody else made is not free."""
    layer, module = made()
    others = torch.arange((E + S) * 3.0).view(E + S, 3)
    module.mine = others[:E]
    layer.sync_tensors(module)
    assert layer.slots_missing is None
    row(module.mine, E).fill_(-1)
    assert torch.equal(others, torch.arange((E + S) * 3.0).view(E + S, 3))


def test_tensors_without_bytes_or_memory_need_no_rows_and_those_elsewhere_have_none():
    layer, module = made()
    module.empty, module.meta = torch.empty(E, 0), torch.empty(E, 4, device="meta")
    layer.sync_tensors(module)
    assert (layer.slots_missing, len(layer.slot_rows())) == (None, 3)
    assert layer.allocate(0, torch.device("cpu"), "empty") is None
    layer.memory.device_type = "cuda"
    assert layer.allocate(8, torch.device("cpu"), "scale") is None
    module.elsewhere = torch.ones(E, 2)
    layer.sync_tensors(module)
    assert layer.slots_missing == "elsewhere (float32[6, 2])"


def test_a_stream_buffer_holds_experts_alone():
    expert_bytes = (1 << 20) + 2
    plain, (layer, module) = made(slots=0, expert_bytes=expert_bytes), made(expert_bytes=expert_bytes)
    assert buffer_bytes(layer) == buffer_bytes(plain[0])
    fill([module.w13.data], E, S)
    buffers = [torch.full((buffer_bytes(layer),), 0xEE, dtype=torch.uint8)]
    replicas = Replicas(layer, buffers)
    assert replicas.parts == [Part(layer.tensors[0].managed, E * expert_bytes, 0, expert_bytes)]
    staging = CpuStaging(layer.memory, buffer_bytes(layer), 1)
    staging.buffers[0].fill_(0xEE)
    staging.copy(0, replicas.parts)
    experts = E * expert_bytes
    assert torch.equal(staging.buffers[0][:experts], module.w13.data.view(-1).view(torch.uint8))
    assert (staging.buffers[0][experts:] == 0xEE).all()


def test_a_stream_buffer_gets_an_expert_from_its_slot_where_it_has_one():
    layer, module = made()
    fill([module.w13.data], E, S)
    expected = [row(module.w13, e).clone() for e in range(E)]
    slot_of = torch.zeros(E, dtype=torch.int32)
    for expert, slot in ((1, S - 1), (4, 0)):
        slot_of[expert], expected[expert] = slot + 1, row(module.w13, E + slot).clone()
    assert not torch.equal(expected[4], row(module.w13, 4))
    replicas = Replicas(layer, [torch.empty(buffer_bytes(layer), dtype=torch.uint8)])
    staging = CpuStaging(layer.memory, buffer_bytes(layer), 1)
    staging.copy(0, replicas.parts, slot_of)
    copied = staging.buffers[0][: layer.tensors[0].layout.nbytes].view(E, -1)
    for mine, theirs in zip(copied, expected, strict=True):
        assert torch.equal(mine, theirs.view(torch.uint8).flatten())


@pytest.mark.parametrize(("ep_rank", "slots"), [(0, 2), (1, 3)])
def test_each_rank_gets_its_share_of_the_slots(ep_rank, slots):
    rank = Rank(config(slots=5), ep_rank=ep_rank, ep_size=2)
    assert [layer.num_slots for layer in rank.model.layers] == [slots] * LAYERS
    assert rank.status()["slots"]["nbytes"] == LAYERS * slots * PAGE_BYTES
    table = residency_table(rank_status(rank.manager), rank.manager.memory.info(), kv_tokens=1)
    (line,) = (line for line in table.splitlines() if "slots a layer" in line)
    assert line.endswith(size(LAYERS * slots * PAGE_BYTES))
    assert rank.status()["slots"]["missing"] is None


@pytest.mark.parametrize("flags", [{}, {"slots": 4, "num_resident": MODEL_EXPERTS}])
def test_without_a_number_or_offloaded_experts_there_are_no_slots(flags):
    rank = Rank(config(**flags))
    assert {layer.num_slots for layer in rank.model.layers} == {0}
    assert rank.status()["slots"] is None


def test_the_status_names_the_first_tensor_without_rows():
    rank = Rank(config(slots=2))
    rank.modules[1].bias = torch.ones(1).expand(MODEL_EXPERTS)
    rank.model.layers[1].sync_tensors(rank.modules[1])
    assert rank.status()["slots"]["missing"] == "bias (float32[8]) of MoE layer 2"


def test_a_draft_model_has_no_slots():
    rank = Rank(config(slots=2))
    layer = Draft(rank).layer
    assert (layer.num_slots, layer.slot_bytes) == (0, 0)


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
def test_residents_change_beside_slots_within_the_same_vram(adapt):
    memory = SimulatedDriver()
    rank = Rank(config(slots=2, warmup_tokens=2, adapt=adapt), memory, expert_bytes=3 * PAGE_BYTES // 2 + 64)
    layouts = [layer.layouts[0] for layer in rank.model.layers]
    assert all(layout.edge_bytes for layout in layouts)
    budget = sum(layout.budget(3) for layout in layouts)
    taken = budget + sum(layout.slot_bytes for layout in layouts)
    assert memory.device_resident == taken
    assert not (rank.model.movable() & np.concatenate([layout.edge for layout in layouts])).any()
    for _ in range(12):
        rank.step([[6, 7], [6, 5], [7, 4]])
        assert sum(layer.resident_bytes for layer in rank.model.layers) <= budget
        assert memory.device_resident <= taken
    assert rank.manager.fault is None
    assert rank.manager.ledger.moves > 0
    for layer in rank.model.layers:
        assert layer.resident_extents()[-1], "the edge stays"
    curve = rank.status()["curve"]
    of_edge = layouts[0].bytes_in(layouts[0].edge)
    assert np.flatnonzero(of_edge).tolist() == [7], "one of four experts that are used alike"
    assert curve["uniform"][0] == curve["global"][0] == pytest.approx(of_edge[7] / layouts[0].expert_bytes / 4)
    assert [curve["uniform"][-1], curve["global"][-1]] == pytest.approx([1.0, 1.0])

"""Layers of one shape share a pool of slots: where experts and slots lie, what moves there, and what stays as it was."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, Draft, Rank, config, slots_of
from builders.managers import E as MODEL_EXPERTS
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.experts.takeover import AllocationMode, WatchWrites
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES, ExpertLayout, whole_blocks
from sglang_uvm_offload.memory.protocol import Location, Span
from sglang_uvm_offload.residency.expert_sizes import LayerExperts, expert_sizes
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import Mover
from sglang_uvm_offload.residency.status import rank_status, residency_table
from sglang_uvm_offload.streaming.replicas import Replicas, buffer_bytes
from sglang_uvm_offload.units import size

E, S, RESIDENT = 6, 3, 2
W13, W2 = 3 * PAGE_BYTES // 2, PAGE_BYTES + 512
"""Bytes of an expert: two of three, and few of 128, begin on a block."""


class Module(torch.nn.Module):
    """Two weights, and scales that are too small to be placed."""

    def __init__(self, layer, w13=W13, w2=W2, scales=3):
        super().__init__()
        self.experts = layer.num_experts
        with (
            WatchWrites(layer.storage_written),
            AllocationMode(self.experts, partial(layer.allocate, written_later=True), layer.write),
        ):
            self.w13, self.w2 = self.weight(w13), self.weight(w2)
            if scales:
                self.scale = torch.nn.Parameter(torch.ones(self.experts, scales), requires_grad=False)
                self.register_buffer("one", torch.full((self.experts,), 2.5))
        layer.sync_tensors(self)

    def weight(self, nbytes):
        return torch.nn.Parameter(torch.empty(self.experts, nbytes // 2, dtype=torch.bfloat16), requires_grad=False)

    def tensors(self):
        return [tensor.data for tensor in (*self.parameters(), *self.buffers())]

    def load(self, seed=0):
        for index, tensor in enumerate(self.tensors()):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed + index)))


class Model:
    """Layers as a model has them once it is built; ``placed`` gives them their homes."""

    def __init__(self, memory=None, layers=3, experts=E, **shape):
        self.memory = memory or SimulatedDriver()
        self.model = ModelExperts(draft=False)
        self.layers = [self.model.add_layer(self.memory, LayerShard(index, experts)) for index in range(layers)]
        self.modules = [Module(layer, **shape) for layer in self.layers]

    def placed(self, slots=S, resident=RESIDENT, load=True):
        for layer, module in zip(self.layers, self.modules, strict=True):
            chosen = np.arange(layer.num_experts) < resident
            if slots:
                layer.join_pool(partial(self.model.pool_for, layer))
            layer.place(lambda layout, chosen=chosen: layout.holding(chosen), num_slots=slots)
            if load:
                module.load(10 * layer.index)
        self.model.place_slots()
        return self

    def rows(self, index, tensor):
        """``uint8[slots, bytes]``: the slots, as a kernel of the layer at ``index`` finds them behind its tensor."""
        layer = self.layers[index]
        assert layer.pool is not None
        return layer.rows_from(tensor.data_ptr())[layer.pool.first_slot(index) :][: layer.pool.num_slots]

    def bytes(self):
        return [tensor.clone() for module in self.modules for tensor in module.tensors()]


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def blocks(address, nbytes, unit):
    return set(range(address // unit, -(-(address + nbytes) // unit)))


STRIDES = [(2 * PAGE_BYTES, PAGE_BYTES), (W13, W2), (PAGE_BYTES + 512, 5 * PAGE_BYTES + 64)]


@pytest.mark.parametrize("pages", [1, 4])
@pytest.mark.parametrize("experts", [1, 6])
@pytest.mark.parametrize("strides", STRIDES, ids=str)
def test_no_block_is_shared_and_one_row_number_reaches_a_slot_in_every_tensor(strides, experts, pages):
    memory = EmulatedMemory(pages * PAGE_BYTES)
    it = Model(memory, experts=experts, w13=strides[0], w2=strides[1]).placed(slots=1)
    (pool,) = it.model.pools()
    assert pool.num_slots == len(it.layers)
    placeable = [tensor for layer in it.layers for tensor in layer.tensors]
    taken = [blocks(tensor.address, tensor.layout.nbytes, memory.block_bytes) for tensor in placeable]
    slots = {(each.address, each.nbytes) for each in (slots_of(pool, tensor) for tensor in placeable)}
    assert len(slots) == 2, "one range a kind"
    taken += [blocks(*each, memory.block_bytes) for each in slots]
    assert sum(map(len, taken)) == len(set.union(*taken))
    before = it.bytes()
    for kind in range(4):
        first = it.rows(0, it.modules[0].tensors()[kind])
        assert first.shape[0] == pool.num_slots
        first.copy_(torch.randint(0, 256, first.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(kind)))
        for index, module in enumerate(it.modules):
            assert module.tensors()[kind].data_ptr() % 16 == 0
            assert torch.equal(it.rows(index, module.tensors()[kind]), first)
    assert same(it.bytes(), before), "no slot is a row of an expert"


@pytest.mark.parametrize("pages", [1, 4])
def test_slots_begin_zeroed_and_keep_their_bytes_in_vram_while_experts_move(pages):
    memory, random = SimulatedDriver(block_bytes=pages * PAGE_BYTES), np.random.default_rng(pages)
    it = Model(memory).placed()
    slots = [it.rows(1, tensor) for tensor in it.modules[1].tensors()]
    assert not any(each.any() for each in slots)
    assert memory.traffic.to_device_bytes == memory.traffic.to_host_bytes == 0, "loading moves nothing"
    for each in slots:
        each.copy_(torch.from_numpy(random.integers(1, 256, tuple(each.shape), dtype=np.uint8)))
    held, before = [each.clone() for each in slots], it.bytes()
    (pool,) = it.model.pools()
    managed = [slots_of(pool, tensor) for tensor in it.layers[0].tensors]
    for _ in range(10):
        for layer in it.layers:
            after = random.random(layer.resident_extents().size) < random.random()
            layer.demote(after)
            layer.promote(after)
            assert (layer.resident_extents() == after).all()
            layer.reread_residency()
            assert (layer.resident_extents() == after).all()
        assert all(memory.location(each, Span(0, each.nbytes)) is Location.DEVICE for each in managed)
    assert same(it.bytes(), before)
    assert same([it.rows(2, tensor) for tensor in it.modules[2].tensors()], held)


@pytest.mark.parametrize("loading", [nullcontext, SimulatedDriver.loading], ids=["at once", "later"])
def test_loading_peaks_at_the_budget(loading):
    memory = SimulatedDriver()
    with loading(memory):
        it = Model(memory, scales=0)
        assert (memory.device_used, memory.host_used) == (0, 0), "address space"
        it.placed()
    memory.notice_writes()
    layouts = tuple(ExpertLayout(E, nbytes, PAGE_BYTES) for nbytes in (W13, W2))
    sizes = expert_sizes([LayerExperts(layouts, E, 0, 1)] * len(it.layers), E)
    assert memory.device_peak == memory.device_resident == sizes.in_vram(RESIDENT, S)
    assert memory.host_peak == sizes.offloaded[RESIDENT]
    assert sum(pool.slot_bytes for pool in it.model.pools()) == sizes.slots[S]
    assert sum(layer.resident_bytes for layer in it.layers) == sizes.resident[RESIDENT]
    assert memory.traffic.to_device_bytes == memory.traffic.to_host_bytes == 0
    assert memory.live_ranges == 2, "what the tensors were built in is gone"


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_the_budget_knows_which_pools_hold_the_experts_of_two_layers(layers):
    sizes = expert_sizes([LayerExperts((ExpertLayout(E, W13, PAGE_BYTES),), E, 0, 1)] * layers, E)
    for slots in range(1, E + 1):
        (pool,) = Model(EmulatedMemory(), layers).placed(slots).model.pools()
        assert sizes.streams_into(slots) == (pool.num_slots >= 2 * E)


def test_without_slots_tensors_stay_where_they_were_built():
    memory = SimulatedDriver()
    it = Model(memory)
    before = [tensor.data_ptr() for module in it.modules for tensor in module.tensors()]
    it.placed(slots=0)
    assert before == [tensor.data_ptr() for module in it.modules for tensor in module.tensors()]
    assert (it.model.pools(), memory.live_ranges) == ([], 2 * len(it.layers))
    assert {(layer.pool, layer.without_pool) for layer in it.layers} == {(None, None)}
    assert it.layers[0].slot_rows() == []


def test_every_storage_is_listed_with_its_rows():
    it = Model().placed()
    for layer, module in zip(it.layers, it.modules, strict=True):
        expected = zip(module.tensors(), (W13, W2, 12, 4), strict=True)
        assert layer.slot_rows() == [(tensor.data_ptr(), nbytes) for tensor, nbytes in expected]
        assert layer.plain_bytes == E * (12 + 4), "experts alone"
        assert torch.equal(module.one, torch.randn(E, generator=torch.Generator().manual_seed(10 * layer.index + 3)))


# ---- tensors that are replaced ----


def repacked(it, index, *names):
    """Post-processing of a layer makes these tensors anew. Returns their bytes."""
    layer, module = it.layers[index], it.modules[index]
    with AllocationMode(E, layer.allocate, layer.write):
        for name in names:
            made = torch.empty_like(getattr(module, name).data) if name.startswith("w") else None
            made = (getattr(module, name).data.clone() if made is None else made.copy_(getattr(module, name).data)) + 1
            if name in module._buffers:
                setattr(module, name, made)
            else:
                setattr(module, name, torch.nn.Parameter(made, requires_grad=False))
    return [getattr(module, name).data.clone() for name in names]


@pytest.mark.parametrize("names", [["w13"], ["w2", "one"], ["scale"], ["w13", "w2", "scale", "one"]], ids=", ".join)
def test_a_replaced_tensor_comes_home_with_its_bytes(names):
    it = Model().placed()
    layer, pool = it.layers[1], it.layers[1].pool
    after = np.random.default_rng(0).random(layer.resident_extents().size) < 0.5
    layer.demote(after)
    layer.promote(after)
    before, rows, taken = layer.generation, layer.slot_rows(), it.memory.device_resident
    others = {name: tensor.clone() for name, tensor in it.modules[1].state_dict().items() if name not in names}
    expected = repacked(it, 1, *names)
    layer.sync_tensors(it.modules[1])
    assert (layer.pool, layer.without_pool) == (pool, None)
    assert layer.slot_rows() == rows, "in the same order, at the same addresses"
    assert layer.generation != before
    assert (layer.resident_extents() == after).all()
    assert same([getattr(it.modules[1], name) for name in names], expected)
    assert same([it.modules[1].state_dict()[name] for name in others], others.values())
    assert (it.memory.live_ranges, it.memory.device_resident) == (4, taken), "nothing is left of what was temporary"
    assert not any(it.rows(0, tensor).any() for tensor in it.modules[0].tensors())


def test_a_tensor_of_another_size_moves_its_layer_to_another_pool_and_back():
    it = Model().placed()
    layer, module = it.layers[1], it.modules[1]
    before, rows = layer.pool, layer.slot_rows()
    kept = {name: tensor.clone() for name, tensor in module.state_dict().items() if name != "w13"}
    of_w2 = layer.layouts[1].holding(np.arange(E) >= 3)
    after = np.concatenate([layer.tensors[0].resident, of_w2])
    layer.demote(after)
    layer.promote(after)
    for nbytes in (2 * W13, W13):
        with AllocationMode(E, layer.allocate, layer.write):
            module.w13 = module.weight(nbytes)
        module.w13.data.copy_(value := torch.randn(module.w13.shape))
        layer.sync_tensors(module)
        assert layer.without_pool is None
        assert torch.equal(module.w13.data, value.to(torch.bfloat16))
        assert same([module.state_dict()[name] for name in kept], kept.values())
        by_bytes = {tensor.layout.expert_bytes: tensor for tensor in layer.tensors}
        assert (by_bytes[W2].resident == of_w2).all(), "what was not replaced is where it was"
        assert by_bytes[nbytes].resident_bytes == by_bytes[nbytes].layout.budget(RESIDENT)
        taken = it.memory.device_resident - sum(each.resident_bytes for each in it.layers) - before.slot_bytes
        assert 0 <= taken <= 4 * PAGE_BYTES, "what it left takes no VRAM, but for the small kinds of two pools"
        if nbytes != W13:
            assert layer.pool not in (None, before)
            assert (layer.pool.num_slots, len(it.model.pools())) == (0, 2), "slots are placed once"
    assert layer.pool is before
    assert sorted(layer.slot_rows()) == sorted(rows), "home again"


def test_views_of_other_shapes_in_the_same_storage_follow():
    it = Model()
    module = it.modules[1]
    module.by_column = module.w13.data.permute(1, 0)
    module.half = module.w13.data.view(E, 2, -1)[:, 1]
    module.flat = module.scale.data.view(-1)
    it.placed()
    for tensor, of in ((module.by_column, module.w13), (module.half, module.w13), (module.flat, module.scale)):
        assert tensor.untyped_storage().data_ptr() == of.data_ptr()
    assert torch.equal(module.by_column, module.w13.data.permute(1, 0))
    assert torch.equal(module.half, module.w13.data.view(E, 2, -1)[:, 1])
    (expected,) = repacked(it, 1, "w2")
    home = it.layers[1].tensors[1].address
    module.turned = module.w2.data.t()
    it.layers[1].sync_tensors(module)
    assert torch.equal(module.turned, expected.t())
    assert module.turned.data_ptr() == module.w2.data_ptr() == home


# ---- tensors that cannot move ----


KEPT = {
    "a parameter's data": lambda module: module.w13.data,
    "an expert": lambda module: module.w2.data[2],
    "a view of another shape": lambda module: module.w13.data.permute(1, 0),
    "another parameter": lambda module: torch.nn.Parameter(module.w2.data, requires_grad=False),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_tensor_that_something_else_holds_stays_and_its_layer_uses_no_slots(what):
    it = Model()
    layer, module = it.layers[1], it.modules[1]
    kept = [KEPT[what](module)]
    it.placed()
    name = "w13" if "13" in str(kept[0].shape) or kept[0].untyped_storage().nbytes() == E * W13 else "w2"
    assert str(layer.without_pool).startswith(f"something keeps a tensor in the place of {name} (bfloat16")
    assert (layer.pool, layer.slot_rows()) == (None, [])
    assert kept[0].untyped_storage().data_ptr() == getattr(module, name).data_ptr(), "it sees what is loaded"
    expected = Model(EmulatedMemory())
    expected.modules[1].load(10)
    assert same(module.tensors(), expected.modules[1].tensors())
    (pool,) = it.model.pools()
    assert pool.num_slots == 2 * S, "the other layers have theirs"
    small = it.memory.device_resident - sum(each.resident_bytes for each in it.layers) - pool.slot_bytes
    assert 0 <= small <= 2 * PAGE_BYTES, "a home that nothing moved to takes nothing"
    kept.clear()
    layer.sync_tensors(module)
    assert (layer.pool, layer.without_pool) == (pool, None)
    assert same(module.tensors(), expected.modules[1].tensors())


def test_a_home_that_something_else_holds_stays_with_what_was_there():
    """As a graph's output may. The tensor that replaces it gets no home."""
    it = Model().placed()
    layer, module = it.layers[1], it.modules[1]
    kept = module.w13.data
    was = kept.clone()
    (expected,) = repacked(it, 1, "w13")
    layer.sync_tensors(module)
    assert str(layer.without_pool).startswith("something keeps a tensor in the place of w13")
    assert torch.equal(kept, was)
    assert torch.equal(module.w13.data, expected)
    assert it.memory.live_ranges == 5, "it has a range of its own"
    del kept
    layer.sync_tensors(module)
    assert layer.without_pool is None
    assert torch.equal(module.w13.data, expected)
    assert it.memory.live_ranges == 4


UNSUITED = {
    "experts interleave": lambda: torch.arange(12.0).view(2, E).t(),
    "one value for all": lambda: torch.ones(1).expand(E),
    "behind something else": lambda: torch.zeros(E + 1, 4)[1:],
    "before something else": lambda: torch.zeros(E + S, 4)[:E],
}


@pytest.mark.parametrize("what", UNSUITED)
def test_a_tensor_without_rows_of_its_own_is_named_and_left_alone(what):
    it = Model().placed()
    layer, module = it.layers[1], it.modules[1]
    pool, rows, before = layer.pool, layer.slot_rows(), it.bytes()
    module.bias = bias = UNSUITED[what]()
    layer.sync_tensors(module)
    assert str(layer.without_pool).startswith(f"bias (float32[{E}")
    assert (layer.pool, layer.slot_rows()) == (None, [])
    assert module.bias is bias
    assert same(it.bytes(), before)
    del module.bias
    layer.sync_tensors(module)
    assert (layer.pool, layer.without_pool, layer.slot_rows()) == (pool, None, rows)


def test_tensors_without_bytes_or_memory_need_no_rows_and_those_elsewhere_have_none():
    it = Model().placed()
    layer, module = it.layers[1], it.modules[1]
    module.empty, module.meta = torch.empty(E, 0), torch.empty(E, 4, device="meta")
    layer.sync_tensors(module)
    assert (layer.without_pool, len(layer.slot_rows())) == (None, 4)
    it.memory.device_type = "cuda"
    layer.sync_tensors(module)
    assert str(layer.without_pool).startswith("w13 (bfloat16[6, "), "on another device than the memory's"


# ---- shapes ----


@pytest.mark.parametrize("shape", [{"w13": 2 * W13}, {"w2": 5 * PAGE_BYTES // 4}, {"scales": 7}], ids=str)
def test_layers_of_two_shapes_have_two_pools(shape):
    it = Model(layers=4)
    it.modules[2] = Module(it.layers[2], **shape)
    it.placed()
    first, second = it.model.pools()
    assert [layer.pool for layer in it.layers] == [first, first, second, first]
    assert (first.num_slots, second.num_slots) == (3 * S, S)
    for first, last in zip(it.modules[0].tensors(), it.modules[3].tensors(), strict=True):
        it.rows(0, first).fill_(3)
        assert (it.rows(3, last) == 3).all()
    assert not any(it.rows(2, tensor).any() for tensor in it.modules[2].tensors()), "though most of their kinds are alike"


def test_layers_whose_rows_rarely_begin_on_a_block_have_no_pool_and_say_so():
    it = Model(w13=5 * PAGE_BYTES + 6).placed()
    assert it.model.pools() == []
    for layer, module in zip(it.layers, it.modules, strict=True):
        assert "rarely begin on a block" in str(layer.without_pool)
        assert (layer.slot_rows(), len(layer.tensors)) == ([], 2)
        expected = torch.randn(module.w13.shape, generator=torch.Generator().manual_seed(10 * layer.index))
        assert torch.equal(module.w13.data, expected.to(torch.bfloat16))


# ---- a server that gives up its VRAM ----


def test_slots_and_small_experts_leave_vram_while_a_server_sleeps():
    it = Model(scales=4096).placed()  # each layer's in pages of their own
    slots = it.rows(0, it.modules[0].w13)
    slots.fill_(7)
    before, resident, taken = it.bytes(), it.model.resident_extents(), it.memory.device_resident
    mover = Mover(it.memory, lambda: False, None)
    mover.sleep(it.layers)
    assert it.memory.device_resident == 0
    assert same(it.bytes(), before)
    mover.wake()
    assert it.memory.device_resident == taken
    assert (it.model.resident_extents() == resident).all()
    assert same(it.bytes(), before)
    assert (slots == 7).all()


# ---- stream buffers ----


def test_a_stream_buffer_holds_experts_alone():
    it = Model(scales=0).placed()
    layer, module = it.layers[1], it.modules[1]
    assert buffer_bytes(layer) == buffer_bytes(Model(scales=0).placed(slots=0).layers[1])
    it.rows(1, module.w13).fill_(7)
    staging = CpuStaging(it.memory, buffer_bytes(layer), 1)
    staging.buffers[0].fill_(0xEE)
    replicas = Replicas(layer, staging.buffers)
    staging.copy(0, replicas.parts)
    for part, tensor in zip(replicas.parts, module.tensors(), strict=True):
        copied = staging.buffers[0][part.offset :]
        assert torch.equal(copied[: part.nbytes], tensor.view(-1).view(torch.uint8))
        assert (copied[part.nbytes : whole_blocks(part.nbytes)] == 0xEE).all()


# ---- a rank ----


@pytest.mark.parametrize(("ep_rank", "slots"), [(0, 2), (1, 3)])
def test_each_rank_gets_its_share_of_the_slots(ep_rank, slots):
    rank = Rank(config(slots=5), ep_rank=ep_rank, ep_size=2)
    assert [layer.num_slots for layer in rank.model.layers] == [slots] * LAYERS
    assert [pool.num_slots for pool in rank.model.pools()] == [slots * LAYERS]
    assert rank.status()["slots"]["nbytes"] == LAYERS * slots * PAGE_BYTES
    table = residency_table(rank_status(rank.manager), rank.manager.memory.info(), kv_tokens=1)
    (line,) = (line for line in table.splitlines() if "slots a layer" in line)
    assert line.endswith(size(LAYERS * slots * PAGE_BYTES))
    assert rank.status()["slots"]["missing"] is None


@pytest.mark.parametrize("flags", [{}, {"slots": 4, "num_resident": MODEL_EXPERTS}])
def test_without_a_number_or_offloaded_experts_there_are_no_slots(flags):
    rank = Rank(config(**flags))
    assert {layer.num_slots for layer in rank.model.layers} == {0}
    assert (rank.model.pools(), rank.status()["slots"]) == ([], None)


def test_the_status_names_the_first_tensor_without_rows():
    rank = Rank(config(slots=2))
    rank.modules[1].bias = torch.ones(1).expand(MODEL_EXPERTS)
    rank.model.layers[1].sync_tensors(rank.modules[1])
    assert rank.status()["slots"]["missing"].startswith("MoE layer 2: bias (float32[8]) has no rows")


def test_a_draft_model_has_no_slots():
    rank = Rank(config(slots=2, draft_num_resident=2))
    layer = Draft(rank).layer
    assert (layer.num_slots, layer.pool, layer.without_pool) == (0, None, None)
    assert len(rank.manager.models[-1].pools()) == 0


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
def test_residents_change_beside_slots_within_the_same_vram(adapt):
    memory = SimulatedDriver()
    rank = Rank(config(slots=2, warmup_tokens=2, adapt=adapt), memory, expert_bytes=3 * PAGE_BYTES // 2 + 64)
    budget = sum(layer.layouts[0].budget(3) for layer in rank.model.layers)
    taken = budget + sum(pool.slot_bytes for pool in rank.model.pools())
    assert memory.device_resident == taken
    for _ in range(12):
        rank.step([[6, 7], [6, 5], [7, 4]])
        assert sum(layer.resident_bytes for layer in rank.model.layers) <= budget
        assert memory.device_resident <= taken
    assert rank.manager.fault is None
    assert rank.manager.ledger.moves > 0


def test_what_a_pool_keeps_ends_with_its_model():
    memory = SimulatedDriver()
    it = Model(memory).placed()
    assert memory.live_ranges == 4
    del it
    gc.collect()
    assert (memory.live_ranges, memory.device_used, memory.host_used) == (0, 0, 0)

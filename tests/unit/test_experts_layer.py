"""A layer's experts: what loading costs, what moving keeps, and what a fault leaves behind."""

import gc
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import simulated_driver
import torch
from builders.managers import placed_layer
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.experts.layer import ExpertsLost
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, MemoryInfo, Span

E = 8
SHAPES = {"w13": (E, 96, 1024), "w2": (E, 64, 1536), "scale": (E, 12)}
TENSOR_BYTES = {name: 2 * int(np.prod(shape)) for name, shape in SHAPES.items()}


def resident(*ids):
    out = np.zeros(E, dtype=bool)
    out[list(ids)] = True
    return out


def holding(*ids):
    """Chooses these experts of each tensor."""
    return lambda layout: layout.holding(resident(*ids))


def extents(layer, experts):
    """Those of all tensors that hold a byte of ``experts`` (``bool[E]``)."""
    return np.concatenate([layout.holding(experts) for layout in layer.layouts])


def in_vram(memory, layer):
    """``bool[extents]`` of all tensors: those that are in VRAM with each of their blocks, as the simulation has it."""
    found = []
    for tensor in layer.tensors:
        for extent in np.eye(tensor.layout.num_extents, dtype=bool):
            (span,) = tensor.layout.spans(extent)
            found.append(memory.location(tensor.managed, span) is Location.DEVICE)
    return np.array(found)


class Module(torch.nn.Module):
    def create(self, layer):
        with AllocationMode(E, partial(layer.allocate, written_later=True)):
            for name, shape in SHAPES.items():
                setattr(self, name, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16), requires_grad=False))
        layer.sync_tensors(self)

    def load(self, seed=0):
        torch.manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape))


def loaded(memory, *ids, num_shared=0):
    layer = placed_layer(memory, LayerShard(3, E, num_shared), holding(*ids))
    module = Module()
    module.create(layer)
    module.load()
    return layer, module


as_populated = pytest.mark.parametrize("loading", [nullcontext, SimulatedDriver.loading], ids=["at once", "later"])
"""When host pages are populated: at the call, or as late as a load may."""


@as_populated
def test_loading_peaks_at_the_final_placement(loading):
    memory = SimulatedDriver()
    with loading(memory):
        layer, module = loaded(memory, 0, 1, 5)
    memory.notice_writes()
    assert (len(layer.tensors), layer.plain_bytes) == (2, TENSOR_BYTES["scale"])
    managed = TENSOR_BYTES["w13"] + TENSOR_BYTES["w2"]
    assert memory.device_peak == layer.resident_bytes
    assert memory.host_peak == managed - layer.resident_bytes == layer.offloaded_bytes
    assert memory.traffic.to_device_bytes == memory.traffic.to_host_bytes == 0, "bytes crossed the link during load"
    assert memory.device_peak == 3 * managed // E
    assert module.w13.shape == SHAPES["w13"]


def test_offloaded_pages_prefer_the_host_before_they_are_written_and_are_there_when_loading_ends():
    memory = SimulatedDriver()
    with memory.loading():
        layer = placed_layer(memory, LayerShard(3, E, 0), holding(0, 1, 5))
        module = Module()
        module.create(layer)
        offloaded = [(t.managed, span) for t in layer.tensors for span in t.layout.spans(~t.resident)]
        assert memory.host_used == 0, "none is populated yet"
        pages = [memory._pages(managed).preferred[simulated_driver.pages_of(span)] for managed, span in offloaded]
        assert (np.concatenate(pages) == simulated_driver.HOST).all()
        assert (in_vram(memory, layer) == layer.resident_extents()).all(), "residents are placed"
        module.w13.data[2] = 7
    assert {memory.location(managed, span) for managed, span in offloaded} == {Location.HOST}
    assert (module.w13[2] == 7).all()
    assert not module.w13[3].any()
    assert memory.traffic.to_host_bytes == 0
    advised = memory.traffic.advise_calls
    layer.promote(extents(layer, resident(2)))
    assert memory.traffic.advise_calls > advised, "moves are made at once"


def test_what_post_processing_makes_has_its_pages_at_once():
    """It is written at once, by no loader."""
    memory = SimulatedDriver()
    with memory.loading():
        layer = placed_layer(memory, LayerShard(3, E, 0), holding())
        module = Module()
        module.create(layer)
        with AllocationMode(E, layer.allocate):
            module.repacked = torch.empty(E, 4 * PAGE_BYTES, dtype=torch.uint8)
        layer.sync_tensors(module)
        *created, repacked = layer.tensors
        assert memory.location(repacked.managed, Span(0, repacked.layout.nbytes)) is Location.HOST
        assert {memory.location(tensor.managed, Span(0, tensor.layout.nbytes)) for tensor in created} == {None}


@pytest.mark.parametrize("written", [False, True])
@as_populated
def test_a_model_that_host_ram_cannot_hold_is_refused_at_the_same_tensor(loading, written, monkeypatch):
    """What is written before it is populated is taken once."""
    memory, layers = SimulatedDriver(), []
    layer_bytes = TENSOR_BYTES["w13"] + TENSOR_BYTES["w2"]
    room = 3 * layer_bytes + TENSOR_BYTES["w13"] + host_margin(layer_bytes)

    def available():
        memory.notice_writes()
        return room - memory.host_used

    monkeypatch.setattr(simulated_driver, "host_available", available)

    def build():
        for layer_id in range(9):
            layer, module = placed_layer(memory, LayerShard(layer_id, E, 0), holding()), Module()
            layers.append((layer, module))
            module.create(layer)
            if written:
                module.load()

    with loading(memory), pytest.raises(ManagedMemoryError, match=r"allocate failed on .* of MoE layer 3"):
        build()
    assert [len(layer.tensors) for layer, _ in layers] == [2, 2, 2, 1]


@as_populated
@pytest.mark.slow
def test_a_repack_peaks_at_one_more_tensor_and_ends_managed(loading):
    memory = SimulatedDriver()
    with loading(memory):
        layer, module = loaded(memory, 0, 1, 5)
        memory.wait_until_populated()
        at_rest = memory.device_used + memory.host_used
        old = {name: p.data.clone() for name, p in module.named_parameters()}
        with AllocationMode(E, layer.allocate):
            for name in ("w13", "w2"):
                repacked = getattr(module, name).data.transpose(1, 2).contiguous()  # a custom op's own allocation
                setattr(module, name, torch.nn.Parameter(repacked, requires_grad=False))
                del repacked
                layer.sync_tensors(module)
                gc.collect()
    memory.notice_writes()
    assert {tensor.address for tensor in layer.tensors} == {module.w13.data_ptr(), module.w2.data_ptr()}
    assert memory.live_ranges == 2
    assert torch.equal(module.w13.data, old["w13"].transpose(1, 2))
    assert memory.device_used + memory.host_used == at_rest
    assert memory.device_peak + memory.host_peak <= at_rest + max(TENSOR_BYTES.values())


def test_bytes_and_addresses_survive_any_sequence_of_moves():
    rng = np.random.default_rng(3)
    memory = SimulatedDriver()
    layer, module = loaded(memory, 0, 1, num_shared=1)
    before = {name: (p.data_ptr(), p.data.clone()) for name, p in module.named_parameters()}
    for _ in range(200):
        wanted = extents(layer, layer.always_resident)
        wanted |= rng.random(wanted.size) < rng.random()
        layer.demote(wanted)
        layer.promote(wanted)
        assert (layer.resident_extents() == wanted).all()
        assert memory.device_resident == layer.resident_bytes
        layer.reread_residency()
        assert (layer.resident_extents() == wanted).all(), "an offloaded extent is in VRAM"
        assert (in_vram(memory, layer) == wanted).all(), "a resident extent is not in VRAM"
    for name, parameter in module.named_parameters():
        address, value = before[name]
        assert parameter.data_ptr() == address
        assert torch.equal(parameter.data.view(torch.int16), value.view(torch.int16))


def test_moving_asks_for_exactly_the_changed_pages():
    memory = SimulatedDriver()
    layer, _ = loaded(memory, 0, 1)
    expert = layer.expert_bytes
    assert expert % PAGE_BYTES == 0
    after = extents(layer, resident(1, 2))
    assert layer.demote(after) == expert
    assert layer.promote(after) == expert
    calls = memory.traffic.prefetch_calls
    assert layer.demote(after) == layer.promote(after) == 0
    assert memory.traffic.prefetch_calls == calls


class HalfWay(SimulatedDriver):
    """Fails each move in the middle of its second span, once armed. ``look``: what its reads tell."""

    armed = False
    look = "tells"

    def place(self, managed, spans, location):
        if not self.armed:
            return super().place(managed, spans, location)
        super().place(managed, [spans[0], Span(spans[1].offset, PAGE_BYTES)], location)
        raise ManagedMemoryError("place", managed.name, spans[1], "injected")

    def in_vram(self, blocks):
        return super().in_vram(blocks) if self.look == "tells" else None


@pytest.mark.parametrize("look", ["tells", "cannot tell"])
@pytest.mark.parametrize(("before", "after", "really"), [((0,), (0, 2, 4, 6), (0, 2)), ((0, 2, 4, 6), (0,), (0, 6))])
def test_after_a_move_that_fails_half_way_no_extent_counts_as_resident_that_is_not_in_vram(before, after, really, look):
    """Experts 2, 4 and 6 are three spans of each tensor. The first one moves, and a block of the second one."""
    memory = HalfWay()
    memory.look = look
    layer, _ = loaded(memory, *before)
    first, second = layer.layouts
    memory.armed = True
    with pytest.raises(ManagedMemoryError, match="injected"):
        layer.demote(extents(layer, resident(*after))) + layer.promote(extents(layer, resident(*after)))
    layer.reread_residency()
    there = np.append(first.holding(resident(*really)), second.holding(resident(*before)))
    assert (in_vram(memory, layer) == there).all()
    known = resident(*really) if look == "tells" else resident(0)
    assert (layer.tensors[0].resident == first.holding(known)).all()
    assert (layer.tensors[1].resident == second.holding(resident(*before))).all(), "nothing of it was on its way"
    for tensor, blocks in zip(layer.tensors, layer.blocks_in_vram, strict=True):
        assert (blocks == tensor.layout.block_mask(tensor.resident)).all()


def test_an_evicted_resident_counts_as_one_after_a_fault():
    """It comes back when a step reads it."""
    memory = SimulatedDriver()
    layer, _ = loaded(memory, 0, 1)
    known = layer.resident_extents()
    for tensor in layer.tensors:
        memory._to_host(memory._pages(tensor.managed), slice(0, 1))
    assert not in_vram(memory, layer)[known].all()
    layer.reread_residency()
    assert (layer.resident_extents() == known).all()


class PoorMemory(SimulatedDriver):
    def info(self):
        return MemoryInfo(0, 0, host_margin(TENSOR_BYTES["w13"]) + TENSOR_BYTES["w13"] // 2)


def test_what_a_step_made_for_itself_is_forgotten_even_if_something_else_lies_there_now():
    memory = SimulatedDriver()
    layer, module = loaded(memory, 0)
    before = list(layer.tensors)
    with AllocationMode(E, layer.allocate):
        scratch = torch.empty(E, PAGE_BYTES, dtype=torch.uint8)
        address = scratch.data_ptr()
        del scratch
        module.repacked = torch.empty(E, PAGE_BYTES, dtype=torch.uint8)
    assert module.repacked.data_ptr() == address
    layer.sync_tensors(module)
    assert [tensor.address for tensor in layer.tensors] == [tensor.address for tensor in before] + [address]
    layer.demote(extents(layer, resident()))
    del module.repacked
    module.foreign = memory.tensor(memory.allocate(E * PAGE_BYTES, "of somebody else")).view(E, PAGE_BYTES)
    assert module.foreign.data_ptr() == address
    layer.sync_tensors(module)
    assert module.foreign.data_ptr() != address
    assert layer.tensors[-1].address == module.foreign.data_ptr()


def test_a_tensor_that_replaces_an_equal_one_is_resident_as_that_was():
    """As when the weights are updated while residents follow the traffic."""
    memory = SimulatedDriver()
    layer, module = loaded(memory, 0, 1)
    after = extents(layer, resident(5, 6))
    layer.demote(after)
    layer.promote(after)
    with AllocationMode(E, layer.allocate):
        module.w13 = torch.nn.Parameter(torch.empty(SHAPES["w13"], dtype=torch.bfloat16), requires_grad=False)
    layer.sync_tensors(module)
    gc.collect()
    assert layer.resident.tolist() == resident(5, 6).tolist()
    assert memory.device_resident == layer.resident_bytes == 2 * layer.expert_bytes


def test_weights_that_are_hidden_after_loading_are_an_error():
    layer, module = loaded(SimulatedDriver(), 0)
    module.w13 = module.w2 = None
    with pytest.raises(ExpertsLost, match=r"3.0 MiB of the 3.0 MiB of the experts of MoE layer 3"):
        layer.sync_tensors(module)


def test_weights_that_are_quantised_to_4_bits_after_loading_replace_the_others():
    memory = SimulatedDriver()
    layer, module = loaded(memory, 0)
    with AllocationMode(E, layer.allocate):
        for name in ("w13", "w2"):
            scratch = [torch.empty(E, TENSOR_BYTES[name] // E, dtype=torch.uint8) for _ in range(4)]
            setattr(module, name, torch.nn.Parameter(scratch[0][:, ::4].contiguous(), requires_grad=False))
    del scratch
    gc.collect()
    layer.sync_tensors(module)
    assert layer.plain_bytes == (TENSOR_BYTES["w13"] + TENSOR_BYTES["w2"]) // 4 + TENSOR_BYTES["scale"], "too small to place"
    assert (layer.tensors, memory.live_ranges, memory.device_resident) == ([], 0, 0), "the scratch and the 16 bits are gone"
    assert layer.resident.all()


def test_a_tensor_on_another_device_is_left_there():
    layer = placed_layer(SimulatedDriver(), LayerShard(3, E), holding())
    assert layer.allocate(PAGE_BYTES, torch.device("cuda"), "w13") is None


def test_demoting_takes_host_ram_the_first_time_only():
    layer, _ = loaded(SimulatedDriver(), 0, 1)
    none, one, two, three = (extents(layer, resident(*ids)) for ids in ((), (1,), (1, 2), (0, 1, 2)))
    assert layer.host_bytes_to_demote(one) == layer.expert_bytes
    layer.demote(one)
    layer.promote(three)
    assert layer.host_bytes_to_demote(two) == 0
    assert layer.host_bytes_to_demote(none) == layer.expert_bytes


def test_too_little_host_memory_is_refused_by_name_before_anything_is_taken_unless_enough_is_resident():
    memory = PoorMemory()
    layer = placed_layer(memory, LayerShard(3, E), holding())
    with pytest.raises(ManagedMemoryError, match=r"MoE layer 3.*takes .*MiB of host RAM, and .*MiB is left"):
        Module().create(layer)
    assert memory.live_ranges == 0
    layer = placed_layer(memory, LayerShard(3, E), holding(*range(4)))
    assert layer.allocate(TENSOR_BYTES["w13"] // E, torch.device("cpu"), "w13") is not None


def test_experts_too_small_to_place_are_where_they_were_after_a_fault():
    layer = placed_layer(SimulatedDriver(), LayerShard(3, E), holding(0, 1))
    layer.reread_residency()
    assert layer.resident.all(), "they are in plain VRAM"

"""A layer that is built before its residents are decided: address space, then placed, before its first weight is read."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, E, config, profile_of
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.pool import ExpertPool
from sglang_uvm_offload.experts.takeover import AllocationMode, HeldStorage, WatchWrites
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES, ExpertLayout
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement

BLOCK_BYTES = PAGE_BYTES
EXPERT_BYTES = 3 * BLOCK_BYTES // 2


def first(number: int, experts: int = E):
    chosen = np.arange(experts) < number
    return lambda layout: layout.holding(chosen)


class Module(torch.nn.Module):
    """A weight of ones, one of zeros, one that nothing is written to, and scales that are too small to place."""

    def __init__(self, layer: ExpertLayer, expert_bytes: int = EXPERT_BYTES):
        super().__init__()
        allocation = AllocationMode(layer.num_experts, partial(layer.allocate, written_later=True), layer.write)
        with WatchWrites(layer.storage_written), allocation:
            self.ones = torch.ones(layer.num_experts, expert_bytes, dtype=torch.uint8)
            self.zeros = torch.zeros(layer.num_experts, expert_bytes, dtype=torch.uint8)
            self.empty = torch.empty(layer.num_experts, expert_bytes, dtype=torch.uint8)
            self.scale = torch.full((layer.num_experts, 3), 2.5)
        layer.sync_tensors(self)


def reserved(memory: SimulatedDriver) -> tuple[ExpertLayer, Module]:
    layer = ExpertLayer(memory, LayerShard(3, E))
    return layer, Module(layer)


def pooled(layer: ExpertLayer) -> int:
    """Lets the layer have slots, and a pool of its own. Returns how many."""
    pools: dict[tuple[int, ...], ExpertPool] = {}

    def of(nbytes: tuple[int, ...]) -> ExpertPool:
        return pools.setdefault(nbytes, ExpertPool(layer.memory, 1, E, nbytes, 2))

    layer.join_pool(of)
    return 2


WRITES = {
    "by index": lambda module: module.zeros.__setitem__(5, 9),
    "a slice of data": lambda module: module.zeros.data[5:6].fill_(9),
    "in place": lambda module: module.zeros.index_fill_(0, torch.tensor([5]), 9),
    "out": lambda module: torch.add(module.zeros, (torch.arange(E, dtype=torch.uint8) == 5).unsqueeze(1) * 9, out=module.zeros),
    "another type": lambda module: module.zeros.view(torch.int16)[5].fill_(0x0909),
}


@pytest.mark.parametrize("pool", [False, True], ids=["as built", "in a pool"])
@pytest.mark.parametrize("how", WRITES)
def test_what_is_written_before_a_layer_is_placed_stays(how, pool):
    """A model may change the values that a tensor begins with."""
    layer, module = reserved(SimulatedDriver())
    with WatchWrites(layer.storage_written):
        module.ones[2] = 7
        WRITES[how](module)
    layer.place(first(3), num_slots=pooled(layer) if pool else 0)
    assert (layer.pool is not None) == pool
    assert module.ones[:, 0].tolist() == [1, 1, 7, *[1] * (E - 3)]
    assert module.zeros[:, -1].tolist() == [0, 0, 0, 0, 0, 9, *[0] * (E - 6)]
    assert not module.empty.any()
    assert (module.scale == 2.5).all()


def test_all_is_copied_where_anything_may_have_been_written():
    """By a loader that builds and reads in one call, which nobody watches."""
    layer, module = reserved(SimulatedDriver())
    module.zeros[5] = 9
    layer.mark_written()
    layer.place(first(3), num_slots=pooled(layer))
    assert module.zeros[:, 0].tolist() == [0, 0, 0, 0, 0, 9, *[0] * (E - 6)]


def test_only_what_was_written_is_copied_to_its_home(monkeypatch):
    layer, _ = reserved(SimulatedDriver())
    copied, move = [], HeldStorage.move

    def noted(found: HeldStorage, flat: torch.Tensor, copy: bool = True) -> None:
        copied.append((found.held[0].name, copy))
        move(found, flat, copy)

    monkeypatch.setattr(HeldStorage, "move", noted)
    layer.place(first(3), num_slots=pooled(layer))
    assert copied == [("ones", True), ("zeros", False), ("empty", False), ("scale", True)]


def test_it_is_placed_as_chosen_and_has_its_first_values():
    memory = SimulatedDriver()
    layer, module = reserved(memory)
    addresses = [tensor.address for tensor in layer.tensors]
    layer.place(first(3))
    memory.notice_writes()
    assert layer.placed
    assert [tensor.address for tensor in layer.tensors] == addresses
    assert memory.device_used == layer.resident_bytes == 3 * ExpertLayout(E, EXPERT_BYTES, BLOCK_BYTES).budget(3)
    written = layer.resident_bytes // 3  # by the CPU, which leaves host pages under the residents among the ones
    assert memory.host_used == 3 * E * EXPERT_BYTES - layer.resident_bytes + written
    assert (module.ones == 1).all()
    assert not module.zeros.any()
    assert (module.scale == 2.5).all()


def test_what_is_zero_once_it_is_placed_is_not_written():
    """An expert's zeros would cross the link."""
    (layer, module), written = reserved(SimulatedDriver()), []
    layer.write(module.empty, lambda: written.append("zeros"), True)
    layer.write(module.empty, lambda: written.append("ones"), False)
    assert written == ["ones"]
    layer.place(first(2))
    layer.write(module.empty, lambda: written.append("later"), True)
    assert written == ["ones", "later"]


def test_a_deep_copy_of_a_tensor_is_taken_over():
    layer, module = reserved(SimulatedDriver())
    layer.place(first(2))
    module.ones = copy.deepcopy(module.ones)
    layer.sync_tensors(module)
    assert len(layer.tensors) == 3
    assert (module.ones == 1).all()


# ---- a model ----


def built(memory: SimulatedDriver, **flags):
    manager = OffloadManager(config(**flags), memory, CpuRoutingCounters, lambda decide: decide(), progress=lambda: False)
    model = manager.begin_model(False)
    modules = []
    for layer_id in range(1, LAYERS + 1):
        layer = model.add_layer(memory, LayerShard(layer_id, E))
        module = torch.nn.Module()
        with AllocationMode(E, layer.allocate, layer.write):
            module.w13 = torch.empty(E, BLOCK_BYTES, dtype=torch.uint8)
        layer.sync_tensors(module)
        modules.append(module)
    return manager, model, modules


def residents(model) -> list[list[int]]:
    return [np.flatnonzero(layer.resident).tolist() for layer in model.layers]


def test_a_model_is_placed_by_its_profile_and_corrected_to_another_number():
    memory = SimulatedDriver()
    manager, model, modules = built(memory)
    assert memory.device_used == 0
    hot = [[5, 6, 7], [1, 2, 3], [0, 4, 6]]
    manager.place_model(model, InitialPlacement(config(num_resident=2), profile_of(hot)))
    assert [set(ids) < set(row) for ids, row in zip(residents(model), hot, strict=True)] == [True] * LAYERS
    for index, module in enumerate(modules):
        module.w13.copy_((torch.arange(E, dtype=torch.uint8) + index).unsqueeze(1).expand(E, BLOCK_BYTES))
    manager.finish_model(model)
    manager.correct(config(num_resident=3))
    assert residents(model) == hot
    assert memory.device_used == LAYERS * 3 * BLOCK_BYTES
    assert manager.placement.config.num_resident == 3
    manager.correct(config(num_resident=1))
    assert [len(ids) for ids in residents(model)] == [1] * LAYERS
    for index, module in enumerate(modules):
        assert (module.w13[:, 0] == torch.arange(E) + index).all(), "no byte is lost"


def test_adaptation_goes_on_from_the_corrected_residents():
    manager, model, _ = built(SimulatedDriver(), adapt="continuous")
    manager.place_model(model, InitialPlacement(config(num_resident=2, adapt="continuous"), None))
    manager.finish_model(model)
    manager.correct(config(num_resident=4, adapt="continuous"))
    assert manager.residents.next.sum() == LAYERS * 4
    adaptation = manager.residents.adaptation
    assert adaptation is not None
    assert adaptation._replaced is model, "its budget is that of the new residents"


@pytest.mark.parametrize("converted_later", [False, True])
def test_tensors_go_to_their_homes_when_they_are_placed_or_once_they_are_converted(converted_later):
    manager, model, modules = built(SimulatedDriver(), slots=2)
    before = [module.w13.data_ptr() for module in modules]
    placement = InitialPlacement(config(num_resident=2, slots=2), None, converted_later=converted_later)
    manager.place_model(model, placement)
    assert (before == [module.w13.data_ptr() for module in modules]) == converted_later
    for layer, module in zip(model.layers, modules, strict=True):
        module.w13.fill_(layer.index + 1)
        layer.join_pool(partial(model.pool_for, layer))
        layer.sync_tensors(module)
    manager.finish_model(model)
    manager.correct(config(num_resident=1, slots=3))
    (pool,) = model.pools()
    assert pool.num_slots == 0, "until all is in VRAM"
    model.place_slots()
    assert pool.num_slots == 3 * LAYERS
    assert np.diff([module.w13.data_ptr() for module in modules]).tolist() == [pool.pitch * BLOCK_BYTES] * (LAYERS - 1)
    assert [int(module.w13.amin()) for module in modules] == [int(module.w13.amax()) for module in modules] == [1, 2, 3]
    assert residents(model) == [[0]] * LAYERS

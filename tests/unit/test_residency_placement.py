"""The residents that a model loads with."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from builders.managers import E, config, profile_of
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.residency.placement import InitialPlacement


def resident(placement: InitialPlacement, *layer_ids: int) -> list[list[int]]:
    """By layer, with one block an expert."""
    chosen = placement.of_layers([LayerShard(layer_id, E) for layer_id in layer_ids])
    return [np.flatnonzero(layer.choose(ExpertLayout(E, BLOCK_BYTES))).tolist() for layer in chosen]


def chosen(placement: InitialPlacement, shard: LayerShard, layout: ExpertLayout) -> np.ndarray:
    """The initial residents of the only layer."""
    (layer,) = placement.of_layers([shard])
    return layer.choose(layout)


def test_lists_of_ids_go_to_the_layers_in_the_order_in_which_they_are_built(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([[0], [1, 2], [3]]))
    manual = config(resident_selection="manual", resident_ids=f"@{path}")
    placement = InitialPlacement(manual, None)
    assert resident(placement, 4, 7, 9) == [[0], [1, 2], [3]]
    second_stage = InitialPlacement(manual, None, first=2)
    assert resident(second_stage, 9) == [[3]]


def test_each_of_two_moe_layers_in_a_decoder_layer_gets_its_own_of_a_profile():
    profile = profile_of([[1, 2, 3], [5, 6, 7], [0, 4, 6]])
    profile = dataclasses.replace(profile, model=dataclasses.replace(profile.model, moe_layers=(1, 1, 2)))
    placement = InitialPlacement(config(), profile)
    assert resident(placement, 1, 1, 2) == [[1, 2, 3], [5, 6, 7], [0, 4, 6]]


def test_a_later_pipeline_stage_takes_its_layers_of_the_profile():
    placement = InitialPlacement(config(), profile_of([[1, 2, 3], [5, 6, 7], [0, 4, 6]]), first=1)
    assert resident(placement, 2, 3) == [[5, 6, 7], [0, 4, 6]]


def test_a_profile_takes_the_blocks_that_serve_most_in_the_room_of_the_first_experts():
    """Experts of one and a half blocks: 0 | 0 1 | 1 | 2 | 2 3 | 3 | ..."""
    layout = ExpertLayout(E, 3 * BLOCK_BYTES // 2)
    manual = InitialPlacement(config(resident_selection="manual", resident_ids="2,5"), None)
    assert np.flatnonzero(chosen(manual, LayerShard(1, E), layout)).tolist() == [3, 4, 7, 8], "whole experts"
    hot = InitialPlacement(config(num_resident=2), profile_of([[2, 3, 5]] * 3))
    assert np.flatnonzero(chosen(hot, LayerShard(1, E), layout)).tolist() == [3, 4, 5]
    assert layout.budget(2) == 3 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("number", "slots", "residents", "kept"),
    [(2, 0, [0, 5], [0]), (1, 0, [0], [0]), (0, 0, [], []), (2, 2, [5, 6], [])],
)
def test_the_first_expert_takes_one_place_of_n_where_kernels_read_it_in_each_step(number, slots, residents, kept):
    """Slots serve it where there are some, and no number of experts is exceeded."""
    layout = ExpertLayout(E, 2 * BLOCK_BYTES)
    cfg = config(num_resident=number, slots=slots, adapt="continuous")
    placement = InitialPlacement(cfg, profile_of([[5, 6]] * 3), keeps_first=True)
    (mine,) = placement.of_layers([LayerShard(1, E)])
    assert np.flatnonzero(mine.choose(layout) | layout.holding(mine.kept)).tolist() == residents
    assert np.flatnonzero(mine.kept).tolist() == kept


def test_the_blocks_of_a_fused_shared_expert_are_not_in_the_room_of_a_profile():
    layout = ExpertLayout(E + 1, 3 * BLOCK_BYTES // 2)
    hot = InitialPlacement(config(num_resident=2), profile_of([[6, 7]] * 3))
    found = chosen(hot, LayerShard(1, E + 1, 1), layout)
    assert np.flatnonzero(found).tolist() == [9, 10, 11], "6 and 7; the shared expert's two blocks come on top"


# ---- groups of experts, beside slots ----

W13, W2 = 3 * BLOCK_BYTES // 2, 3 * BLOCK_BYTES // 4
"""Every second expert begins on a block, and every fourth."""


def residents_of(slots, num_resident, hot=None, sizes=(W13, W2), num_shared=0, memory=None, **flags):
    """The only layer of a model, placed by a profile of the experts ``hot`` or without one."""
    memory, cfg = memory or SimulatedDriver(block_bytes=BLOCK_BYTES), config(num_resident=num_resident, slots=slots, **flags)
    layer = ExpertLayer(memory, LayerShard(1, E + num_shared, num_shared))
    module = torch.nn.Module()
    with AllocationMode(E + num_shared, layer.allocate):
        for index, nbytes in enumerate(sizes):
            setattr(module, f"w{index}", torch.empty(E + num_shared, nbytes, dtype=torch.uint8))
    layer.sync_tensors(module)
    (placed,) = InitialPlacement(cfg, profile_of([hot] * 3) if hot else None).of_layers([layer.shard])
    layer.place(placed.choose, placed.kept, placed.slots, grouped=placed.grouped)
    return layer


def halves(layer):
    """The experts that are in VRAM in part."""
    return np.flatnonzero((layer.offloaded_bytes_by_expert > 0) & (layer.offloaded_bytes_by_expert < layer.expert_bytes))


def test_beside_slots_a_profile_keeps_groups_of_whole_experts():
    apart, together = residents_of(0, 4, [1, 2, 5, 6]), residents_of(2, 4, [4, 5, 6, 0])
    assert halves(apart).size
    assert (halves(together).size, np.flatnonzero(together.resident).tolist()) == (0, [4, 5, 6, 7])
    assert apart.resident_bytes == together.resident_bytes == 4 * (W13 + W2)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ({"slots": 1}, "slots are too few to hold what groups leave out"),
        ({"num_resident": 3}, "groups would take more VRAM"),
        ({"num_resident": 2, "resident_selection": "manual", "resident_ids": "5-6"}, "ids are given"),
        ({"sizes": (3 * W13, 3 * W2)}, "large experts are mostly whole blocks"),
        ({"sizes": (W13, W13 + W13 // 15)}, "too many experts would be one group"),
        ({"sizes": (BLOCK_BYTES, 2 * BLOCK_BYTES)}, "each expert is whole blocks"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_residents_are_chosen_by_single_blocks_where(case, why):
    usual = {"slots": 4, "num_resident": 4, "hot": [1, 2, 5, 6]}
    layer = residents_of(**usual | case)
    assert [layout.group for layout in layer.layouts] == [1, 1], why


def test_a_shared_expert_is_in_no_group_with_routed_ones():
    layer = residents_of(4, 4, [4, 5, 6, 0], num_shared=1)
    assert np.flatnonzero(layer.resident).tolist() == [4, 5, 6, 7, 8]
    assert [layout.group for layout in layer.layouts] == [4, 4]


@pytest.mark.parametrize(("number", "kept"), [(7, 4), (8, 8), (3, 0)])
def test_another_number_of_residents_keeps_as_many_whole_groups(number, kept):
    memory = SimulatedDriver(block_bytes=BLOCK_BYTES)
    layer = residents_of(4, 4, memory=memory)
    (placed,) = InitialPlacement(config(num_resident=number, slots=4), None).of_layers([layer.shard])
    after = layer.replace(placed.choose, placed.slots)
    layer.demote(after)
    layer.promote(after)
    assert np.flatnonzero(layer.resident).tolist() == list(range(kept))
    assert memory.device_resident == layer.resident_bytes <= number * (W13 + W2)


def test_what_replaces_a_tensor_has_its_groups_where_they_are_whole_blocks():
    layer = residents_of(4, 4, [4, 5, 6, 0])
    for nbytes, group, there in ((W13, 4, [4, 5, 6, 7]), (W2, 4, [4, 5, 6, 7]), (W2 // 2, 1, None)):
        module = torch.nn.Module()
        with AllocationMode(E, layer.allocate):
            module.w0, module.w1 = (torch.empty(E, size, dtype=torch.uint8) for size in (W13, nbytes))
        layer.sync_tensors(module)
        assert [layout.group for layout in layer.layouts] == [4, group]
        assert there is None or np.flatnonzero(layer.resident).tolist() == there

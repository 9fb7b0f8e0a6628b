"""The residents that a model loads with."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from builders.managers import E, config, profile_of

from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.residency.placement import InitialPlacement


def resident(placement: InitialPlacement, *layer_ids: int) -> list[list[int]]:
    """By layer, with one block an expert."""
    chosen = placement.of_layers([LayerShard(layer_id, E) for layer_id in layer_ids])
    return [np.flatnonzero(layer.choose(ExpertLayout(E, BLOCK_BYTES))).tolist() for layer in chosen]


def chosen(placement: InitialPlacement, shard: LayerShard, layout: ExpertLayout) -> np.ndarray:
    """Of the only layer."""
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


def test_another_number_places_the_same_layers_from_the_first_on():
    placement = InitialPlacement(config(), profile_of([[1, 2, 3], [5, 6, 7], [0, 4, 6]]), first=1)
    assert resident(placement, 2, 3) == [[5, 6, 7], [0, 4, 6]]
    fewer = placement.with_residents(1)
    assert resident(fewer, 2, 3) == [[5], [0]]
    assert placement.config.num_resident == 3, "that of the first is as it was"


def test_a_profile_takes_the_blocks_that_serve_most_in_the_room_of_the_first_experts():
    """Experts of one and a half blocks: 0 | 0 1 | 1 | 2 | 2 3 | 3 | ..."""
    layout = ExpertLayout(E, 3 * BLOCK_BYTES // 2)
    manual = InitialPlacement(config(resident_selection="manual", resident_ids="2,5"), None)
    assert np.flatnonzero(chosen(manual, LayerShard(1, E), layout)).tolist() == [3, 4, 7, 8], "whole experts"
    hot = InitialPlacement(config(num_resident=2), profile_of([[2, 3, 5]] * 3))
    assert np.flatnonzero(chosen(hot, LayerShard(1, E), layout)).tolist() == [3, 4, 5]
    assert layout.budget(2) == 3 * BLOCK_BYTES


def test_the_blocks_of_a_fused_shared_expert_are_not_in_the_room_of_a_profile():
    layout = ExpertLayout(E + 1, 3 * BLOCK_BYTES // 2)
    hot = InitialPlacement(config(num_resident=2), profile_of([[6, 7]] * 3))
    found = chosen(hot, LayerShard(1, E + 1, 1), layout)
    assert np.flatnonzero(found).tolist() == [9, 10, 11], "6 and 7; the shared expert's two blocks come on top"

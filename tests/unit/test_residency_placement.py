"""The residents that a model loads with."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders.managers import E, config, profile_of

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.residency.placement import InitialPlacement


def resident(placement: InitialPlacement, layer_id: int, ep_rank: int = 0, ep_size: int = 1) -> list[int]:
    return np.flatnonzero(placement.resident(layer_id, E // ep_size, 0, ep_rank, ep_size)).tolist()


def test_lists_of_ids_go_to_the_layers_in_the_order_in_which_they_are_built(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(json.dumps([[0], [1, 2], [3]]))
    manual = config(resident_selection="manual", resident_ids=f"@{path}")
    placement = InitialPlacement(manual, None)
    assert [resident(placement, layer) for layer in (4, 7, 9)] == [[0], [1, 2], [3]]
    with pytest.raises(FlagError, match="no list for MoE layer 4 "):
        resident(placement, 11)
    second_stage = InitialPlacement(manual, None, layers_before=2)
    assert resident(second_stage, 9) == [3]


def test_a_file_of_ids_is_read_once(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[[5], [6]]")
    manual = config(resident_selection="manual", resident_ids=f"@{path}")
    path.unlink()
    placement = InitialPlacement(manual, None)
    assert [resident(placement, layer) for layer in (1, 2)] == [[5], [6]]


def test_a_profile_that_does_not_know_a_layer_or_an_expert_ends_the_launch():
    placement = InitialPlacement(config(), profile_of([[5, 6, 7]] * 3))
    assert resident(placement, 2) == [5, 6, 7]
    with pytest.raises(FlagError, match="experts 0 to 7 of decoder layer 9"):
        resident(placement, 9)
    with pytest.raises(FlagError, match="experts 8 to 15 of decoder layer 2"):
        placement.resident(2, 8, 0, 1, 2)

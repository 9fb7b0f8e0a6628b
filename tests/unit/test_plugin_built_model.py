"""The built model says which layers route: over pipeline stages, and against what ids and profiles were read for."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders.managers import config, profile_of

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin import built_model
from sglang_uvm_offload.plugin.built_model import BuiltModel
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement

NAME, ARCHITECTURE = "m", "M"
FIRST_STAGE = ([1, 2], 8, 3)


def built(monkeypatch: pytest.MonkeyPatch, layers: list[int], pp_rank: int = 0, pp_size: int = 1) -> BuiltModel:
    """A rank with these MoE layers of 8 experts; with two stages the other one is ``FIRST_STAGE``."""
    group = SimpleNamespace(all_gather_object=lambda part: [FIRST_STAGE, part])
    monkeypatch.setattr(built_model, "get_parallel", lambda: SimpleNamespace(pp_rank=pp_rank, pp_size=pp_size, pp_group=group))
    held: list[Any] = [SimpleNamespace(layer_id=layer) for layer in layers]
    return BuiltModel(ModelExperts(draft=False, layers=held, num_experts=8), top_k=3)


def ids_file(folder: Path, lists: list[list[int]]) -> Any:
    path = folder / "ids.json"
    path.write_text(json.dumps(lists))
    return config(resident_selection="manual", resident_ids=f"@{path}")


def test_the_layers_of_all_stages_are_what_a_profile_is_of(monkeypatch):
    model = built(monkeypatch, [5, 7], pp_rank=1, pp_size=2).routed_model(NAME, ARCHITECTURE)
    assert (model.moe_layers, model.num_experts, model.top_k) == ((1, 2, 5, 7), 8, 3)


def test_a_profile_of_the_layers_that_were_built_is_used_whatever_a_config_says(monkeypatch):
    model = built(monkeypatch, [1, 2, 3])
    model.check(InitialPlacement(config(), profile_of([[0]] * 3)), model.routed_model(NAME, ARCHITECTURE))


def test_a_profile_of_other_layers_ends_the_launch(monkeypatch):
    model = built(monkeypatch, [0, 1, 2])
    with pytest.raises(FlagError, match=r"--expert-offload-profile: .*moe_layers \(1, 2, 3\), not \(0, 1, 2\)"):
        model.check(InitialPlacement(config(), profile_of([[0]] * 3)), model.routed_model(NAME, ARCHITECTURE))


@pytest.mark.parametrize(("lists", "fits"), [(3, True), (2, False), (4, False)])
def test_as_many_lists_of_ids_as_layers_were_built(monkeypatch, tmp_path, lists, fits):
    model = built(monkeypatch, [1, 2, 3])
    placement = InitialPlacement(ids_file(tmp_path, [[0]] * lists), None)
    if fits:
        model.check(placement, model.routed_model(NAME, ARCHITECTURE))
        return
    with pytest.raises(FlagError, match=f"--expert-offload-resident-ids: lists {lists} layers, .* has 3 MoE layers: 1, 2, 3"):
        model.check(placement, model.routed_model(NAME, ARCHITECTURE))


@pytest.mark.parametrize(("assumed", "fits"), [(2, True), (1, False)])
def test_lists_that_were_read_for_another_stage_end_the_launch(monkeypatch, tmp_path, assumed, fits):
    model = built(monkeypatch, [5], pp_rank=1, pp_size=2)
    placement = InitialPlacement(ids_file(tmp_path, [[0], [1], [2]]), None, layers_before=assumed)
    if fits:
        model.check(placement, model.routed_model(NAME, ARCHITECTURE))
        return
    with pytest.raises(FlagError, match="--expert-offload-resident-ids"):
        model.check(placement, model.routed_model(NAME, ARCHITECTURE))

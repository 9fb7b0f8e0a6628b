"""The built model says which layers route: over pipeline stages, and against what ids and profiles were read for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders.configs import requested_config as config
from builders.locations import located
from builders.managers import profile_of

from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.plugin.rank import built_model
from sglang_uvm_offload.plugin.rank.built_model import BuiltModel
from sglang_uvm_offload.residency.model import ModelExperts

pytestmark = pytest.mark.sglang

NAME, ARCHITECTURE = "m", "M"
FIRST_STAGE = ([1, 2], (8, 8), 3)


def stage(monkeypatch: pytest.MonkeyPatch, pp_rank: int, pp_size: int, **group: Any) -> None:
    """This process is that stage of a pipeline, whose group can do ``group``."""
    parallel = SimpleNamespace(pp_rank=pp_rank, pp_size=pp_size, pp_group=SimpleNamespace(**group))
    monkeypatch.setattr(built_model, "get_parallel", lambda: parallel)


def held(layers: list[int]) -> Any:
    """Layers of 8 experts with these ids."""
    return [SimpleNamespace(shard=LayerShard(layer, 8), layer_id=layer, location=located(1, 8)[0]) for layer in layers]


def built(monkeypatch: pytest.MonkeyPatch, layers: list[int], pp_rank: int = 0, pp_size: int = 1) -> BuiltModel:
    """A rank with these MoE layers of 8 experts; with two stages the other one is ``FIRST_STAGE``."""
    stage(monkeypatch, pp_rank, pp_size, all_gather_object=lambda part: [FIRST_STAGE, part])
    return BuiltModel(ModelExperts(draft=False, layers=held(layers)), top_k=3)


def problems(model: BuiltModel, given: Any, profile: Any = None) -> list[str]:
    return model.problems(given, profile, model.routed_model(NAME, ARCHITECTURE))


def ids_file(folder: Path, lists: list[list[int]]) -> Any:
    path = folder / "ids.json"
    path.write_text(json.dumps(lists))
    return config(resident_selection="manual", resident_ids=f"@{path}")


def test_the_layers_of_all_stages_are_what_a_profile_is_of(monkeypatch):
    model = built(monkeypatch, [5, 7], pp_rank=1, pp_size=2).routed_model(NAME, ARCHITECTURE)
    assert (model.moe_layers, model.num_experts, model.top_k) == ((1, 2, 5, 7), 8, 3)


def test_a_profile_of_other_layers_ends_the_launch(monkeypatch):
    model = built(monkeypatch, [0, 1, 2])
    given = config(profile="a.npz,b.npz")
    (problem,) = problems(model, given, profile_of([[0]] * 3))
    assert re.match(r"--expert-offload-profile a.npz,b.npz: .*moe_layers \(1, 2, 3\), not \(0, 1, 2\)", problem)


@pytest.mark.parametrize(("lists", "fits"), [(3, True), (2, False), (4, False)])
def test_as_many_lists_of_ids_as_layers_were_built(monkeypatch, tmp_path, lists, fits):
    model = built(monkeypatch, [1, 2, 3])
    given = ids_file(tmp_path, [[0]] * lists)
    if fits:
        assert problems(model, given) == []
        return
    wanted = rf"--expert-offload-resident-ids '@.*ids.json': lists {lists} layers, .* 3 MoE layers needs a list: 1, 2, 3"
    (problem,) = problems(model, given)
    assert re.match(wanted, problem)


def test_ids_and_residents_that_are_more_than_the_experts_that_were_built_end_the_launch(monkeypatch):
    model = built(monkeypatch, [1, 2, 3])
    given = config(num_resident=9, resident_selection="manual", resident_ids="0,8")
    ids, number = problems(model, given)
    assert ids == "--expert-offload-resident-ids '0,8': expert 8 does not exist; the model's experts are 0-7"
    assert number.startswith("--expert-offload-num-resident 9: the model has 8 routed experts a layer")


def test_more_slots_than_experts_that_are_offloaded_end_the_launch(monkeypatch):
    model = built(monkeypatch, [1, 2, 3])
    assert problems(model, config(num_resident=5, slots=3)) == []
    (problem,) = problems(model, config(num_resident=6, slots=3))
    assert problem.startswith("--expert-offload-slots 3: 6 residents leave only 2 of 8 experts a layer offloaded")


REPLICATED = np.array([0, 1, 2, 3, 4, 5, 6, 7, 5, 5])


def replicated(*ids: int) -> Any:
    where = ExpertLocation(REPLICATED, range(10))
    return [SimpleNamespace(shard=LayerShard(layer, 10), layer_id=layer, location=where) for layer in ids]


@pytest.mark.parametrize(("ids", "fits"), [("0,1,2,3", True), ("0,5", True), ("0,1,5", False)])
def test_named_experts_take_the_room_of_all_their_replicas(monkeypatch, ids, fits):
    stage(monkeypatch, 0, 1)
    layers: Any = replicated(1, 2)
    model = BuiltModel(ModelExperts(draft=False, layers=layers), top_k=3)
    assert (model.num_experts, model.redundant) == (8, 2)
    given = config(num_resident=4, resident_selection="manual", resident_ids=ids)
    if fits:
        assert problems(model, given) == []
        return
    (problem,) = problems(model, given)
    assert re.search(r"names 10 experts over 2 layers, including replicas .* allows 8", problem)


@pytest.mark.parametrize("own", [[5, 7], [0, 1]])
def test_a_stage_follows_the_layers_that_are_built_before_it(monkeypatch, own):
    """So do its numbers where its layers count from 0, as those of SGLang's Transformers fallback do."""
    model = built(monkeypatch, own, pp_rank=1, pp_size=2)
    assert model.first == 2
    assert model.moe_layers == (1, 2, *([5, 7] if own == [5, 7] else [3, 4]))


def test_auto_takes_ids_whatever_number_it_comes_to(monkeypatch):
    """Whether they fit in it is asked once it is known."""
    model = built(monkeypatch, [1, 2, 3])
    given = config(num_resident="auto", adapt="continuous", resident_ids="0-4")
    assert problems(model, given) == []
    assert model.room_problems(given.resident_ids, 5) == []
    (problem,) = model.room_problems(given.resident_ids, 4)
    assert "names 5 experts a layer, but --expert-offload-num-resident 4 allows 4" in problem


def test_layers_get_the_numbers_that_they_have_in_the_whole_model(monkeypatch):
    stage(monkeypatch, 1, 2, all_gather_object=lambda part: [FIRST_STAGE, part])
    layers = held([0, 1])
    BuiltModel(ModelExperts(draft=False, layers=layers), top_k=3)
    assert [layer.shard.layer_id for layer in layers] == [3, 4]


def test_a_model_without_a_moe_layer_ends_the_launch_when_it_is_built(monkeypatch):
    model = built(monkeypatch, [])
    (problem,) = problems(model, config(num_resident=4))
    assert problem == "--expert-offload-num-resident 4: the built model has no MoE layer"

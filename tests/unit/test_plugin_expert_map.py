"""SGLang's map of experts as layers and the manager get it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, E, Rank, config
from sglang.srt.eplb.expert_location import ExpertLocationMetadata

from sglang_uvm_offload.plugin.rank import expert_map

pytestmark = pytest.mark.sglang


def sglangs_map(experts: list[list[int]]) -> Any:
    """As SGLang makes it, of as many decoder layers."""
    at = torch.tensor(experts)
    copies = torch.zeros(len(experts), E, at.shape[1], dtype=torch.int64)
    return ExpertLocationMetadata(at, at.clone(), copies, copies, copies[..., 0], 2, None)


BACKWARDS, SHIFTED = list(range(E))[::-1], [*range(1, E), 0]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The map of four decoder layers, of which the first is dense."""
    known = sglangs_map([BACKWARDS] * 4)
    monkeypatch.setattr(expert_map, "get_global_expert_location_metadata", lambda: known)
    group = SimpleNamespace(all_gather_object=lambda mine: [mine])
    monkeypatch.setattr(expert_map, "get_parallel", lambda: SimpleNamespace(moe_ep_group=group))
    monkeypatch.setattr(expert_map, "get_device", lambda: SimpleNamespace(device="cpu"))
    return known


def layer(**changes: Any) -> SimpleNamespace:
    given = {"num_local_experts": 5, "num_fused_shared_experts": 1, "moe_ep_rank": 1, "moe_ep_size": 2, "layer_id": 3}
    return SimpleNamespace(**{**given, "uses_expert_location": True, **changes})


def test_a_layer_has_the_experts_of_its_rank(known: Any) -> None:
    where = expert_map.shard_of(layer()).located()
    assert where.ids.tolist() == [3, 2, 1, 0]
    known.update(sglangs_map([SHIFTED] * 4), [3])
    assert where.ids.tolist() == [3, 2, 1, 0], "SGLang changes its map in place"
    assert expert_map.shard_of(layer()).located().ids.tolist() == [5, 6, 7, 0]


def test_a_draft_models_layer_has_the_experts_of_its_own_numbers(known: Any) -> None:
    where = expert_map.shard_of(layer(uses_expert_location=False, layer_id=61)).located()
    assert where.ids.tolist() == [4, 5, 6, 7]
    assert where.is_trivial


def test_layers_follow_the_map_once_sglang_has_rearranged_experts(known: Any) -> None:
    rank = Rank(config(resident_selection="first_n"), experts=BACKWARDS)
    rank.step([[0, 1]])
    settled: list[int] = []

    def update(*args: Any, **kwargs: Any) -> str:
        settled.append(rank.manager.ledger.steps)
        known.update(sglangs_map([SHIFTED] * 4), kwargs["update_layer_ids"])
        return "missing"

    assert expert_map.around_update(rank.rearranging, update, "updater", update_layer_ids=[1, 3]) == "missing"
    assert settled == [1], "steps are counted before"
    found = [where.experts.tolist() for where in rank.model.locations]
    assert found == [SHIFTED, BACKWARDS, SHIFTED]
    counts = rank.manager.routing_by_expert(wait=True).counts
    assert np.flatnonzero(counts[:, 1, 0].sum(axis=0)).tolist() == [6, 7]
    assert counts.sum() == LAYERS * 2 * 2

"""The records of a report: what contradicts itself is refused, and several ranks' are joined."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from builders.managers import Rank, config
from builders.reports import info, replayed, result, stepped

from sglang_uvm_offload.report.source import ServerInfo
from sglang_uvm_offload.residency.history import Curve, Past, combined

LONG = [0] * (1 << 14)
SAVE = {"what": "trace", "under_way": False, "saved_at": None, "failures": 0, "error": None}


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    return stepped(Rank(config()))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("resident_ids", [[0]], "one list for each of layers"),
        ("resident_ids", [[0], [9], [1]], "layer 2 must be 0..7"),
        ("resident_experts", -1, "resident_experts"),
        ("history", {"seconds": []}, "history"),
        ("history.moves", [2, 1], "must not fall"),
        ("history.steps", [0], "equally long"),
        ("curve", {"decode_steps": 1}, "curve"),
        ("curve.residents", [0, 0, 1], "must rise"),
        ("curve.uniform", [0.0], "equally long"),
        ("profile", {"hit_rate": 1.5, "best": 1.0, "tokens": 40, "kept": True}, "profile.hit_rate"),
        ("trace", {"path": "t", "tokens": 1, "requests": 2, "dropped_steps": 0, "stopped": False}, "2 requests cannot have 1"),
        ("layers.1.expert_ids", [0, 1], "has 8 experts and 2 ids"),
        ("layers.1.expert_ids", [*range(7), 8192], "must be 0..8191"),
        # Charts of these would take a hundred times their bytes.
        *((f"history.{name}", LONG, r"length <= \d+") for name in Past.__struct_fields__),
        ("curve.uniform", LONG, r"length <= \d+"),
        ("resident_ids.1", LONG, r"length <= \d+"),
        ("saves", [SAVE] * (1 << 14), r"length <= \d+"),
    ],
)
def test_statistics_that_contradict_themselves_or_are_endless_are_refused(served, path: str, value: Any, reason: str):
    status = copy.deepcopy(served)
    status["curve"] |= {"residents": [0, 1, 2], "uniform": [0.0] * 3, "global": [0.0] * 3}
    *parents, name = [int(step) if step.isdigit() else step for step in path.split(".")]
    where: Any = status
    for parent in parents:
        where = where[parent]
    where[name] = value
    with pytest.raises(msgspec.ValidationError, match=reason):
        info(status)


def test_layers_beyond_what_is_shown_are_refused_before_memory_is_taken(served):
    huge = copy.deepcopy(served)
    huge["layers"][1] |= {"first_expert": 8000, "experts": 8000}
    huge["resident_ids"][1] = []
    with pytest.raises(msgspec.ValidationError, match="more than 8192 are not shown"):
        info(huge)


def test_results_of_two_residencies_are_not_compared():
    with pytest.raises(msgspec.ValidationError, match="one residency and one batch"):
        replayed(result("lru"), result("lfu", residency=0.25))


def test_ranks_are_named_by_what_tells_them_apart(served):
    ids = [{"dp": dp, "pp": 0, "tp": tp, "ep": tp} for dp in (0, 1) for tp in (0, 1)]
    assert info(*[served | {"rank": each} for each in ids]).rank_names == ["dp0 tp0", "dp0 tp1", "dp1 tp0", "dp1 tp1"]
    assert info(*[served | {"rank": each} for each in ids[:2]]).rank_names == ["tp0", "tp1"]
    earlier = {name: value for name, value in served.items() if name != "rank"}
    assert info(earlier, earlier).rank_names == ["rank 0", "rank 1"]


def test_every_rank_is_shown_where_the_server_tells_of_it(served):
    every = {"version": "1", "ranks": [served | {"rank": {"tp": tp}} for tp in (0, 1)], "left_out": 2}
    content = {"internal_states": [{"expert_offload": served}], "all_ranks": every}
    assert msgspec.convert(content, ServerInfo).rank_names == ["tp0", "tp1"]
    assert len(msgspec.convert(content | {"all_ranks": every | {"ranks": []}}, ServerInfo).ranks) == 1
    every["ranks"][1]["resident_ids"] = [[0]]
    with pytest.raises(msgspec.ValidationError, match="one list for each of layers"):
        msgspec.convert(content, ServerInfo)


def test_the_latest_half_of_a_history_is_what_is_judged_of_late():
    columns = {name: [0, 10, 30, 60, 100] for name in Past.__struct_fields__} | {"seconds": [0.0, 25.0, 50.0, 75.0, 100.0]}
    assert Past(**columns).recent_growth("moves") == 70


def test_the_curve_of_several_ranks_weighs_them_by_their_activations():
    busy = Curve(300, 3000, 0.8, [0, 4, 8], [0.0, 0.8, 1.0], [0.0, 0.8, 1.0])
    idle = Curve(200, 1000, 0.4, [0, 2, 8], [0.0, 0.4, 1.0], [0.0, 0.4, 1.0])
    both = combined([busy, idle])
    assert both is not None
    assert both.residents == [0, 2, 4, 8]
    assert both.at(2, False) == pytest.approx(0.75 * 0.4 + 0.25 * 0.4)
    assert both.at(4, True) == pytest.approx(0.75 * 0.8 + 0.25 * 0.6)
    assert (both.present, both.activations, both.decode_steps) == (pytest.approx(0.7), 4000, 300)

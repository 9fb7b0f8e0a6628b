"""The report's page: what it shows of a server's ranks or of a replay's policies, and each rule of its advice."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest
from test_manager import LAYERS, E, Rank, config
from test_svg import cells_of, texts

from sglang_uvm_offload import report_page
from sglang_uvm_offload.history import Curve, Past
from sglang_uvm_offload.report_page import (
    FEW_STEPS,
    IN_HOST,
    IN_VRAM,
    KINDS,
    NOT_SHOWN,
    PARTLY,
    SHARED,
    ReplayResults,
    ServerInfo,
    advice,
    replay_advice,
    replay_page,
    server_page,
)
from sglang_uvm_offload.routing import Phase

FAULT = "prefetch of w13 of MoE layer 3 <b>failed</b>"


def info(*statuses: dict[str, Any], **state: Any) -> ServerInfo:
    """What a server that shows these ranks says, decoded as the command decodes it."""
    state = {"expert_offload_num_resident": "3", "expert_offload_resident_selection": "frequency", **state}
    states = [{"expert_offload": status, **state} for status in statuses]
    return msgspec.json.decode(json.dumps({"internal_states": states, "model_path": "m/a<b>"}), type=ServerInfo)


def words(html: str) -> str:
    """The text that a browser shows."""
    shown: list[str] = []
    parser = HTMLParser()
    parser.handle_data = shown.append
    parser.feed(html.partition("<body>")[2])
    return " ".join(" ".join(shown).split())


def stepped(rank: Rank, steps: int = 4) -> dict[str, Any]:
    """The status of a rank that prefilled once and decoded, on experts 0, 1 (resident) and 7."""
    rank.step([[0, 7]] * 5, phase=Phase.PREFILL)
    for _ in range(steps):
        rank.step([[0, 7], [1, 7]])
    return rank.manager.status()


def test_a_page_shows_a_servers_figures():
    said = words(server_page(info(stepped(Rank(config()))), "http://host:30000"))
    for expected in (
        "source http://host:30000",
        "model m/a<b>",
        "frequency, warmup, uniform",
        "9 of 24",  # experts in VRAM
        "50.0 %",  # coverage of routed tokens
        "0.9 MiB",  # 5 steps x 3 layers x 64 KiB read through
        "Of 36 uses of experts in 4 decode steps",
        "now: 3",
        "The host backend emulates",
    ):
        assert expected in said, f"{expected!r} is not in {said}"
    assert "SGLang shows the first rank" not in said


@pytest.mark.parametrize("section", ["Advice", "What was served", "Where the experts are", "Coverage over time"])
def test_a_page_of_a_server_that_served_nothing_has_every_section(section):
    said = words(server_page(info(Rank(config()).manager.status()), "s"))
    assert section in said
    assert "not counted" in said


def test_a_page_without_moe_layers_is_a_page():
    empty = Rank(config()).manager.status() | {"layers": [], "resident_ids": [], "curve": None}
    assert "Where the experts are" in words(server_page(info(empty), "s"))


def test_what_a_source_says_is_text():
    hostile = stepped(Rank(config())) | {"fault": FAULT, "backend": "<script>", "adapt": "<img src=x>"}
    html = server_page(info(hostile), "<script>alert(1)</script>")
    assert "<script" not in html
    assert "<img" not in html
    assert FAULT in words(html)


def residency(*statuses: dict[str, Any], columns: int = E, **state: Any) -> list[list[int]]:
    figure = report_page._map(info(*statuses, **state))
    assert [text for text in texts(figure) if text in ("1", "2", "3")][:LAYERS] == ["1", "2", "3"]
    return cells_of(figure, (LAYERS, columns), KINDS).tolist()


def test_the_map_of_one_rank_is_its_residents():
    status = Rank(config(resident_selection="manual", resident_ids="2,7")).manager.status()
    row = [IN_VRAM if expert in (2, 7) else IN_HOST for expert in range(E)]
    assert residency(status) == [row] * LAYERS


def test_fused_shared_experts_stand_behind_the_routed_ones():
    status = Rank(config(num_resident=1), num_shared=1).manager.status()
    assert residency(status, columns=E + 1)[0] == [IN_VRAM] + [IN_HOST] * 7 + [SHARED]


def ep_rank(rank: int) -> dict[str, Any]:
    """Expert-parallel rank ``rank`` of 2, which holds four of the experts 1, 4 and 6 that are resident."""
    cfg = config(resident_selection="manual", resident_ids="1,4,6")
    return Rank(cfg, ep_rank=rank, ep_size=2).manager.status()


def test_the_map_joins_expert_parallel_ranks():
    row = [IN_VRAM if expert in (1, 4, 6) else IN_HOST for expert in range(E)]
    both = info(ep_rank(0), ep_rank(1), tp_size=2, ep_size=2, dp_size=2, enable_dp_attention=True)
    assert cells_of(report_page._map(both), (LAYERS, E), KINDS).tolist() == [row] * LAYERS
    assert "SGLang shows the first rank" not in words(server_page(both, "s"))


def test_experts_of_ranks_that_are_not_shown_are_unknown_and_the_page_says_so():
    row = [IN_HOST, IN_VRAM, IN_HOST, IN_HOST, *[NOT_SHOWN] * 4]
    assert residency(ep_rank(0), tp_size=2, ep_size=2) == [row] * LAYERS
    assert "SGLang shows the first rank" in words(server_page(info(ep_rank(0), tp_size=2, ep_size=2), "s"))
    assert "SGLang shows the first rank" in words(server_page(info(ep_rank(0), pp_size=2), "s"))


def test_the_map_shows_where_replicas_differ():
    one, other = (Rank(config(resident_selection="manual", resident_ids=ids)).manager.status() for ids in ("0,1", "1,2"))
    assert residency(one, other, dp_size=2)[0] == [PARTLY, IN_VRAM, PARTLY, *[IN_HOST] * 5]


def test_every_rank_is_in_the_table_and_the_first_ones_in_the_pictures():
    status = stepped(Rank(config()))
    said = words(server_page(info(*[status] * 6, dp_size=6), "s"))
    assert all(f"DP rank {rank} 9 of 24" in said for rank in range(6))
    assert "first 4 of 6 ranks" in said
    assert "read through, DP rank 3" in said
    assert "read through, DP rank 4" not in said


def test_coverage_by_layer_is_over_all_ranks():
    cold, hot = Rank(config()), Rank(config())
    for _ in range(4):
        cold.step([[7, 6]])
        hot.step([[0, 1]])
    figure = report_page._layers_chart(info(cold.manager.status(), hot.manager.status()).ranks)
    assert [title.text for title in figure.iter("title")][1:] == ["1: 50", "2: 50", "3: 50"]


# Advice. A budget of 4 of 8 experts, whose best set covers 70 %, and as told by the arguments.

UNIFORM = [0.0, 0.5, 0.7, 0.9, 1.0]


def judged(
    *,
    present: float = 0.69,
    served: float = 0.0,
    uniform: list[float] = UNIFORM,
    pooled: list[float] | None = None,
    steps: int = 1000,
    moved: tuple[int, int] = (0, 0),
    status: dict[str, Any] | None = None,
    ranks: int = 1,
    **state: Any,
) -> list[str]:
    """The advice to a server with these figures. ``served`` and ``moved`` (bytes) are of the first and the latest half."""
    curve = {"decode_steps": steps, "touches": 1000, "present": present, "residents": [0, 2, 4, 6, 8]}
    curve |= {"uniform": uniform, "global": pooled or uniform}
    past = msgspec.to_builtins(Past([0.0, 50.0, 100.0], *[[0, 0, 0]] * 9))
    past |= {"touches": [0, 1000, 2000], "touches_resident": [0, 0, int(1000 * served)]}
    past |= {"read_through_bytes": [0, 1000, 2000], "moved_bytes": [0, moved[0], sum(moved)], "moves": [0, 1, 2]}
    base = Rank(config(num_resident=4)).manager.status() | {"curve": curve, "history": past, "warmup_done": True}
    return advice(info(*[base | (status or {})] * ranks, **state))


def test_nothing_is_to_be_said_but_the_budget_of_residents_that_are_well_chosen():
    chosen, budget = judged()
    assert chosen.startswith("Residents are well chosen: they cover 69.0 %")
    assert "70.0 %" in chosen
    assert budget.startswith("--expert-offload-num-resident 6, for 0.4 MiB more VRAM on each rank, would have raised")
    assert "from 70.0 % to 90.0 %: 20.0 points" in budget


def test_residents_that_serve_well_of_late_are_well_chosen_whatever_they_would_have_covered_before():
    assert judged(present=0.1, served=0.75)[0].startswith("Residents are well chosen: they cover 75.0 %")


def test_residents_some_points_below_the_best_are_told_without_a_remedy():
    assert judged(present=0.64)[0] == (
        "Residents are 6.0 points below the best: they cover 64.0 % of what decode steps use, and the best fixed set of this "
        "size, in hindsight, 70.0 %."
    )


@pytest.mark.parametrize(
    ("adapt", "selection", "remedy"),
    [
        ("warmup", "frequency", "--expert-offload-adapt continuous, or a longer warm-up"),
        ("warmup", "first_n", "They do not follow the traffic: --expert-offload-adapt continuous does."),
        ("off", "frequency", "They do not follow the traffic: --expert-offload-adapt continuous does."),
        ("continuous", "frequency", "faster than residents can pay to follow"),
    ],
)
def test_badly_chosen_residents_have_a_remedy(adapt, selection, remedy):
    said = judged(present=0.4, status={"adapt": adapt}, expert_offload_resident_selection=selection)[0]
    assert said.startswith("Residents are 30.0 points below the best")
    assert remedy in said


def test_a_larger_budget_that_gains_little_is_told_as_such():
    flat = [0.0, 0.5, 0.7, 0.72, 1.0]
    assert "would only have raised the best coverage from 70.0 % to 72.0 %" in judged(uniform=flat)[1]


def test_a_smaller_budget_that_loses_nothing_is_named():
    flat = [0.0, 0.695, 0.7, 0.9, 1.0]
    said = judged(uniform=flat)
    assert "--expert-offload-num-resident 2 would have lowered the best coverage by 0.5 points only" in said[2]
    assert "0.4 MiB of each rank's VRAM" in said[2]
    assert not any("num-resident 2" in line for line in judged())


def test_the_flag_counts_the_residents_of_all_expert_parallel_ranks():
    assert judged(ep_size=2, tp_size=2)[1].startswith("--expert-offload-num-resident 12, for 0.4 MiB")


def test_layers_that_differ_are_better_served_by_one_ranking():
    pooled = [0.0, 0.6, 0.76, 0.92, 1.0]
    said = judged(pooled=pooled)
    assert any(line.startswith("Layers differ") and "6.0 points" in line for line in said)
    assert not any(line.startswith("Layers differ") for line in judged())
    already = judged(pooled=pooled, present=0.76, status={"adapt": "continuous", "per_layer": "global"})
    assert not any(line.startswith("Layers differ") for line in already)
    assert "76.0 %." in already[0], "not measured against the ranking that it follows"


def test_many_moves_of_late_are_told():
    assert not any("Moves are" in line for line in judged(moved=(9000, 0)))
    assert not any("Moves are" in line for line in judged(moved=(0, 300)))
    said = judged(moved=(0, 1000))[-1]
    assert said.startswith("Moves are 50.0 % of the bytes over the link")
    assert "after the warm-up: the share falls" in said
    assert "--expert-offload-adapt warmup" in judged(moved=(0, 1000), status={"adapt": "continuous"})[-1]


def test_a_fault_comes_first_and_names_its_rank():
    said = judged(status={"fault": FAULT}, ranks=2)
    assert said[0].startswith(f"Moving experts stopped (DP rank 0): {FAULT}.")
    assert "(DP rank 1)" in said[1]
    assert "well chosen" in said[2]


def test_where_everything_is_resident_offloading_is_not_needed():
    assert judged(status={"offloaded_experts": 0}) == [
        "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."
    ]


def test_residents_are_not_judged_before_the_warm_up_is_over():
    (said,) = judged(present=0.1, status={"warmup_done": False})
    assert said.startswith("The warm-up is not over")


def test_residents_are_not_judged_by_few_steps():
    (said,) = judged(present=0.1, steps=FEW_STEPS - 1)
    assert said.startswith(f"Only {FEW_STEPS - 1} decode steps were counted")
    assert judged(steps=FEW_STEPS)[0].startswith("Residents are well chosen")


def test_without_decode_steps_nothing_is_judged():
    (said,) = judged(status={"curve": None})
    assert said.startswith("No decode step was counted")


def test_the_curve_of_several_ranks_weighs_them_by_their_touches():
    busy = Curve(300, 3000, 0.8, [0, 4, 8], [0.0, 0.8, 1.0], [0.0, 0.8, 1.0])
    idle = Curve(200, 1000, 0.4, [0, 2, 8], [0.0, 0.4, 1.0], [0.0, 0.4, 1.0])
    both = report_page.combined([busy, idle])
    assert both is not None
    assert both.residents == [0, 2, 4, 8]
    assert both.at(2, False) == pytest.approx(0.75 * 0.4 + 0.25 * 0.4)
    assert both.at(4, True) == pytest.approx(0.75 * 0.8 + 0.25 * 0.6)
    assert (both.present, both.touches, both.decode_steps) == (pytest.approx(0.7), 4000, 300)


# Replays


def result(policy: str, **fields: Any) -> dict[str, Any]:
    out = {"policy": policy, "residency": 0.5, "batch": 1, "coverage": 0.8, "moves_per_step": 0.25, "step_seconds": 0.002}
    out |= {"read_bytes_per_step": 3 * 2.0**20, "moved_bytes_per_step": 2.0**20}
    return {**out, "per_layer_coverage": [0.7, 0.9], "coverage_over_time": [0.6, 0.8, 0.9], **fields}


def replayed(*results: dict[str, Any]) -> ReplayResults:
    return msgspec.json.decode(json.dumps({"trace": "t.npz", "results": results}), type=ReplayResults)


def test_a_page_of_a_replay_shows_every_policy_in_every_picture():
    html = replay_page(replayed(result("lru"), result("belady", coverage=0.95), result("adaptive<b>")), "r.json")
    said = words(html)
    assert "trace t.npz" in said
    for policy in ("lru", "belady", "adaptive<b>"):
        assert f"{policy} 50.0 % 1" in said
        assert said.count(policy) >= 5
    for shown in ("95.0 %", "0.250", "3.0 MiB", "1.0 MiB", "2.000 ms", "MiB a decode step"):
        assert shown in said


def test_the_best_policy_that_a_server_offers_is_named_with_its_flag():
    said = replay_advice(replayed(result("static"), result("adaptive", step_seconds=0.001)).results)
    assert said == [
        "Of what a server offers here, adaptive (--expert-offload-adapt continuous) spends the least time on the link."
    ]


def test_a_cache_that_would_be_faster_is_told_as_what_no_server_offers():
    said = replay_advice(replayed(result("adaptive"), result("lru", step_seconds=0.001)).results)
    assert said[1].startswith("lru would take 50.0 % less")
    assert len(replay_advice(replayed(result("adaptive"), result("lru", step_seconds=0.003)).results)) == 1


def test_knowing_the_future_bounds_what_can_be_gained():
    said = replay_advice(replayed(result("adaptive"), result("belady", coverage=0.95, step_seconds=0.0)).results)
    assert said[1].startswith("Knowing the future, belady covers 15.0 points more")


def test_a_replay_without_a_policy_that_is_offered_advises_nothing():
    (said,) = replay_advice(replayed(result("lru")).results)
    assert said.startswith("None of these policies")


def test_a_replay_in_which_everything_is_resident_says_so():
    assert "smaller residency" in replay_advice(replayed(result("adaptive", coverage=1.0)).results)[-1]


# What is refused


def broken(**fields: Any) -> dict[str, Any]:
    return stepped(Rank(config())) | fields


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resident_ids": [[0]]}, "one list for each of layers"),
        ({"resident_ids": [[0], [9], [1]]}, "layer 2 must be 0..7"),
        ({"resident_experts": -1}, "resident_experts"),
        ({"history": {"seconds": []}}, "history"),
        ({"curve": {"decode_steps": 1}}, "curve"),
    ],
)
def test_statistics_that_contradict_themselves_are_refused(fields, reason):
    with pytest.raises(msgspec.ValidationError, match=reason):
        info(broken(**fields))


def test_layers_beyond_what_is_shown_are_refused_before_memory_is_taken():
    huge = broken()
    huge["layers"][1] |= {"first_expert": 8000, "experts": 8000}
    huge["resident_ids"][1] = []
    with pytest.raises(msgspec.ValidationError, match="more than 8192 are not shown"):
        info(huge)


@pytest.mark.parametrize(("column", "values", "reason"), [("moves", [2, 1], "must not fall"), ("steps", [0], "equally long")])
def test_a_history_that_cannot_be_is_refused(column, values, reason):
    status = broken()
    status["history"][column] = values
    with pytest.raises(msgspec.ValidationError, match=reason):
        info(status)


@pytest.mark.parametrize(("fields", "reason"), [({"residents": [0, 0, 1]}, "must rise"), ({"uniform": [0.0]}, "equally long")])
def test_a_curve_that_cannot_be_is_refused(fields, reason):
    status = broken()
    status["curve"] |= {"residents": [0, 1, 2], "uniform": [0.0] * 3, "global": [0.0] * 3} | fields
    with pytest.raises(msgspec.ValidationError, match=reason):
        info(status)


def test_results_of_two_residencies_are_not_compared():
    with pytest.raises(msgspec.ValidationError, match="one residency and one batch"):
        replayed(result("lru"), result("lfu", residency=0.25))


def test_the_latest_half_of_a_history_is_what_is_judged_of_late():
    columns = {name: [0, 10, 30, 60, 100] for name in Past.__struct_fields__} | {"seconds": [0.0, 25.0, 50.0, 75.0, 100.0]}
    assert Past(**columns).of_late("moves") == 70

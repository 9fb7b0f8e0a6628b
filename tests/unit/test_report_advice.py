"""Each rule of the advice that a report gives: what it says, and when it is silent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders.managers import Rank, config
from builders.reports import FAULT, info, replayed, result

from sglang_uvm_offload.report.advice import FEW_STEPS, advice, replay_advice
from sglang_uvm_offload.residency.history import Past

# A budget of 4 of 8 experts, whose best set reaches 70 %, changed by the arguments.

UNIFORM = [0.0, 0.5, 0.7, 0.9, 1.0]


def judged(
    *,
    present: float = 0.69,
    served: float = 0.0,
    uniform: list[float] = UNIFORM,
    pooled: list[float] | None = None,
    steps: int = 1000,
    moved: tuple[int, int] = (0, 0),
    streamed: tuple[int, int] = (0, 0),
    status: dict[str, Any] | None = None,
    ranks: int = 1,
    **state: Any,
) -> list[str]:
    """The advice to a server with these figures. ``served``, ``moved`` and ``streamed`` (bytes) are of the first and the latest
    half."""
    curve = {"decode_steps": steps, "activations": 1000, "present": present, "residents": [0, 2, 4, 6, 8]}
    curve |= {"uniform": uniform, "global": pooled or uniform}
    past = msgspec.to_builtins(Past([0.0, 50.0, 100.0], *[[0, 0, 0]] * 11))
    past |= {"activations": [0, 1000, 2000], "activations_resident": [0, 0, int(1000 * served)]}
    past |= {"zero_copy_bytes": [0, 1000, 2000], "moved_bytes": [0, moved[0], sum(moved)], "moves": [0, 1, 2]}
    past |= {"streamed_bytes": [0, streamed[0], sum(streamed)]}
    base = Rank(config(num_resident=4)).status() | {"curve": curve, "history": past, "warmup_done": True}
    return advice(info(*[base | (status or {})] * ranks, **state))


def test_nothing_is_to_be_said_but_the_budget_of_residents_that_are_well_chosen():
    chosen, budget = judged()
    assert chosen == (
        "Residents are well chosen: their hit rate in decode steps is 69.0 %, and the best fixed set of this size, in "
        "hindsight, reaches 70.0 %."
    )
    assert budget.startswith("--expert-offload-num-resident 6, for 0.4 MiB more VRAM on each rank, would have raised")
    assert "from 70.0 % to 90.0 %: 20.0 points" in budget


def test_residents_with_a_high_recent_hit_rate_are_well_chosen_whatever_they_would_have_reached_before():
    (first, *_) = judged(present=0.1, served=0.75)
    assert first.startswith("Residents are well chosen")
    assert "75.0 %" in first


def test_residents_some_points_below_the_best_are_named_without_a_remedy():
    first = judged(present=0.64)[0]
    assert first.startswith("Residents are 6.0 points below the best")
    assert "64.0 %" in first
    assert first.endswith("70.0 %.")


@pytest.mark.parametrize(
    ("adapt", "selection", "remedy"),
    [
        ("warmup", "frequency", "--expert-offload-adapt continuous, or a longer warm-up"),
        ("warmup", "first_n", "They do not follow the traffic; with --expert-offload-adapt continuous"),
        ("off", "frequency", "They do not follow the traffic; with --expert-offload-adapt continuous"),
        ("continuous", "frequency", "a larger budget"),
    ],
)
def test_badly_chosen_residents_have_a_remedy(adapt, selection, remedy):
    said = judged(present=0.4, status={"adapt": adapt}, expert_offload_resident_selection=selection)[0]
    assert said.startswith("Residents are 30.0 points below the best")
    assert remedy in said


def test_a_larger_budget_that_gains_little_is_told_as_such():
    flat = [0.0, 0.5, 0.7, 0.72, 1.0]
    assert "would only have raised the best hit rate from 70.0 % to 72.0 %" in judged(uniform=flat)[1]


def test_a_smaller_budget_that_loses_nothing_is_named():
    flat = [0.0, 0.695, 0.7, 0.9, 1.0]
    said = judged(uniform=flat)
    assert said[2].startswith("--expert-offload-num-resident 2 would have lowered the best hit rate")
    assert "0.5 points" in said[2]
    assert "0.4 MiB of each rank's VRAM" in said[2]
    assert not any("num-resident 2" in line for line in judged())


def test_the_flag_counts_the_residents_of_all_expert_parallel_ranks():
    assert judged(ep_size=2, tp_size=2)[1].startswith("--expert-offload-num-resident 12, for 0.4 MiB")


def test_layers_that_differ_are_better_served_by_one_ranking():
    pooled = [0.0, 0.6, 0.76, 0.92, 1.0]
    said = judged(pooled=pooled)
    assert any(line.startswith("Layers differ") and "6.0 points" in line for line in said)
    assert not any(line.startswith("Layers differ") for line in judged())
    already = judged(pooled=pooled, present=0.76, status={"adapt": "continuous"})
    assert not any(line.startswith("Layers differ") for line in already)
    assert "76.0 %." in already[0], "not measured against the ranking that it follows"


def test_many_moves_of_late_are_told():
    assert not any("Moves are" in line for line in judged(moved=(9000, 0)))
    assert not any("Moves are" in line for line in judged(moved=(0, 300)))
    said = judged(moved=(0, 1000))[-1]
    assert said.startswith("Moves are 50.0 % of the bytes that were moved or read in place")
    assert "the share falls" in said
    assert "--expert-offload-adapt warmup" in judged(moved=(0, 1000), status={"adapt": "continuous"})[-1]


def test_what_prefill_streams_does_not_hide_moves():
    assert judged(moved=(0, 1000), streamed=(0, 10**6)) == judged(moved=(0, 1000))


def test_evicted_residents_come_first_and_name_their_rank_and_the_cure():
    said = judged(status={"evicted_bytes": 3 << 30}, ranks=2)
    assert said[0].startswith("About 3.00 GiB of residents were evicted from VRAM (DP rank 0)")
    assert "a larger --expert-offload-headroom-gb, fewer residents, or no other process" in said[0]
    assert "(DP rank 1)" in said[1]
    for none in (None, 0):
        assert not any("evicted" in line for line in judged(status={"evicted_bytes": none}))


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


# Replays


def test_the_best_policy_that_a_server_offers_is_named_with_its_flag():
    said = replay_advice(replayed(result("static"), result("adaptive", step_seconds=0.001)).results)
    (line,) = said
    assert "adaptive (--expert-offload-adapt continuous) spends the least time on the link" in line


def test_a_cache_that_would_be_faster_is_told_as_what_no_server_offers():
    said = replay_advice(replayed(result("adaptive"), result("lru", step_seconds=0.001)).results)
    assert said[1].startswith("lru")
    assert "50.0 % less; no server offers it" in said[1]
    assert len(replay_advice(replayed(result("adaptive"), result("lru", step_seconds=0.003)).results)) == 1


def test_slots_are_a_policy_that_a_server_offers():
    (said,) = replay_advice(replayed(result("adaptive"), result("slots", step_seconds=0.001)).results)
    assert said.startswith("Of the policies that a server offers, slots (--expert-offload-slots) spends the least time")


def test_knowing_the_future_bounds_what_can_be_gained():
    said = replay_advice(replayed(result("adaptive"), result("belady", hit_rate=0.95, step_seconds=0.0)).results)
    assert said[1].startswith("belady")
    assert "15.0 points" in said[1]


def test_a_replay_without_a_policy_that_is_offered_advises_nothing():
    (said,) = replay_advice(replayed(result("lru")).results)
    assert said.startswith("A server offers none of these policies")


def test_a_replay_in_which_everything_is_resident_says_so():
    assert "smaller residency" in replay_advice(replayed(result("adaptive", hit_rate=1.0)).results)[-1]

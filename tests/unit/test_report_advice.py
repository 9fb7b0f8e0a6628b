"""A server's alerts, and each rule of a report's advice: what it says, and when it is silent."""

from __future__ import annotations

import pytest
from builders.reports import FAULT, judged, replayed, result, slots

from sglang_uvm_offload.report.advice import advice, alerts, replay_advice


def test_a_hit_rate_that_is_not_judged_gets_no_advice():
    assert advice(judged(steps=1)) == []


@pytest.mark.parametrize(
    ("figures", "first"),
    [
        ({}, "No fixed choice of 4 of 8 experts a layer does much better."),
        ({"present": 0.66}, "--expert-offload-num-resident 6"),  # nothing on how well they are chosen
        ({"present": 0.94, "uniform": [0.0, 0.5, 0.95, 0.96, 1.0]}, "The hit rate is high: nothing needs to be done."),
        ({"adapt": "continuous", "served": (0.7, 0.7)}, "With 4 of 8 experts a layer in VRAM, only more of them raise"),
        ({"adapt": "continuous", "served": (0.5, 0.5)}, "The traffic changes too fast to follow; more experts in VRAM help"),
        ({"slots": slots(2), "served": (0.85, 0.89)}, "With 6 of 8 experts a layer in VRAM, only more of them raise the hit "),
    ],
)
def test_first_comes_how_well_the_experts_in_vram_are_chosen(figures, first):
    assert next(line for line in advice(judged(**figures)) if not line.startswith("In the latest")).startswith(first)


def test_followers_are_judged_by_what_they_serve_after_the_warmup():
    late, only_more = advice(judged(adapt="continuous", served=(0.2, 0.72)))[:2]
    assert late == "In the latest half of the time, the hit rate was 72.0 %."
    assert only_more.startswith("With 4 of 8 experts")
    assert not any(line.startswith("In the latest") for line in advice(judged(adapt="continuous", served=(0.7, 0.72))))


@pytest.mark.parametrize(
    ("adapt", "selection", "remedy"),
    [
        ("warmup", "frequency", "--expert-offload-adapt continuous, or a longer warm-up"),
        ("warmup", "first_n", "Residents do not follow the traffic; with --expert-offload-adapt continuous they would."),
        ("off", "frequency", "Residents do not follow the traffic; with --expert-offload-adapt continuous they would."),
        ("continuous", "frequency", "a larger --expert-offload-num-resident, or --expert-offload-slots."),
    ],
)
def test_badly_chosen_residents_have_a_remedy(adapt, selection, remedy):
    said = advice(judged(present=0.4, served=(0.4, 0.4), adapt=adapt, state={"expert_offload_resident_selection": selection}))
    assert remedy in said[0]


def test_other_budgets_are_named_if_they_are_worth_it():
    more = "--expert-offload-num-resident 6, for 0.4 MiB more VRAM on each rank, would have raised the best fixed choice from"
    assert budgets() == [f"{more} 70.0 % to 90.0 %: 20.0 points."]
    (little,) = budgets(uniform=[0.0, 0.5, 0.7, 0.72, 1.0])
    assert "would only have raised the best fixed choice from 70.0 % to 72.0 %: 2.0 points" in little
    assert budgets(uniform=[0.0, 0.695, 0.7, 0.9, 1.0])[1] == (
        "--expert-offload-num-resident 2 would have lowered the best fixed choice by only 0.5 points, and left 0.4 MiB of each "
        "rank's VRAM to the KV cache."
    )
    assert budgets(state={"ep_size": 2, "tp_size": 2})[0].startswith("--expert-offload-num-resident 12, for 0.4 MiB")


def test_with_slots_the_other_budgets_are_of_slots():
    (more,) = budgets(slots=slots(2), served=(0.9, 0.9))
    assert more.startswith(
        "--expert-offload-slots 4, for 0.4 MiB more VRAM on each rank, would have raised the best fixed choice"
    )
    flat = [0.0, 0.895, 0.897, 0.9, 0.901]
    assert [line.split()[:2] for line in budgets(slots=slots(3), uniform=flat)] == [
        ["--expert-offload-slots", "4,"],
        ["--expert-offload-slots", "2"],
    ]
    assert len(budgets(slots=slots(2), uniform=flat)) == 1, "without slots nothing follows the traffic"


def budgets(**figures):
    return [line for line in advice(judged(**figures)) if line.startswith(("--expert-offload-num", "--expert-offload-slots"))]


def test_layers_that_differ_are_better_served_by_one_ranking():
    pooled = [0.0, 0.6, 0.76, 0.92, 1.0]
    said = advice(judged(pooled=pooled))
    assert said[-1].startswith("Layers differ: in the same VRAM")
    assert "6.0 points" in said[-1]
    already = advice(judged(pooled=pooled, served=(0.76, 0.76), adapt="continuous"))
    assert not any(line.startswith("Layers differ") for line in already)


def test_many_moves_of_late_are_told_whatever_prefill_streams():
    assert not any("Moves are" in line for moved in ((9000, 0), (0, 300)) for line in advice(judged(moved=moved)))
    said = advice(judged(moved=(0, 1000)))
    assert said[-1].startswith("Moves are 50.0 % of the bytes that were moved or read in place")
    assert "the share falls" in said[-1]
    assert advice(judged(moved=(0, 1000), streamed=(0, 10**6))) == said
    assert "--expert-offload-adapt warmup" in advice(judged(moved=(0, 1000), adapt="continuous"))[-1]


def test_faults_and_evictions_alert_with_their_ranks():
    said = alerts(judged(evicted_bytes=3 << 30, fault=FAULT, ranks=2))
    assert len(said) == 4
    assert said[0].startswith(f"Moving experts stopped (rank 0): {FAULT}.")
    assert "(rank 1)" in said[1]
    assert said[2].startswith("About 3.00 GiB of residents were evicted from VRAM (rank 0)")
    assert "a larger --expert-offload-headroom-gb, fewer residents, or no other process" in said[2]
    assert alerts(judged(evicted_bytes=0)) == alerts(judged(evicted_bytes=None)) == []


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            [result("static"), result("adaptive", step_seconds=0.001)],
            ["adaptive (--expert-offload-adapt continuous) spends the least time on the link: 1.000 ms a decode step, with"],
        ),
        ([result("adaptive"), result("slots", step_seconds=0.001)], ["slots (--expert-offload-slots) spends the least"]),
        ([result("adaptive"), result("lru", step_seconds=0.001)], ["adaptive", "take 50.0 % less; no server offers it"]),
        ([result("adaptive"), result("lru", step_seconds=0.003)], ["adaptive"]),
        (
            [result("adaptive"), result("belady", hit_rate=0.95, step_seconds=0.0)],
            ["adaptive", "a hit rate 15.0 points higher"],
        ),
        ([result("lru")], ["A server offers none of these policies"]),
        ([result("adaptive", hit_rate=1.0)], ["adaptive", "a smaller residency may suffice"]),
    ],
)
def test_a_replay_names_the_best_policy_of_a_server_and_what_it_misses(results, said):
    found = replay_advice(replayed(*results).results)
    assert len(found) == len(said)
    assert all(part in line for line, part in zip(found, said, strict=True))

"""The verdict of a report and each rule of its advice: what it says, and when it is silent."""

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
    ranks: int = 1,
    state: dict[str, Any] | None = None,
    **status: Any,
) -> list[str]:
    """The advice to a server with these figures. ``served``, ``moved`` and ``streamed`` (bytes) are of the first and the latest
    half."""
    curve = {"decode_steps": steps, "activations": 1000, "present": present, "residents": [0, 2, 4, 6, 8]}
    curve |= {"uniform": uniform, "global": pooled or uniform}
    past = msgspec.to_builtins(Past([0.0, 50.0, 100.0], *[[0, 0, 0]] * 11))
    past |= {"activations": [0, 1000, 2000], "activations_resident": [0, 0, int(1000 * served)]}
    past |= {"routed": [0, 500, 1000], "routed_resident": [0, 250, 500]}
    past |= {"zero_copy_bytes": [0, 1000, 2000], "moved_bytes": [0, moved[0], sum(moved)], "moves": [0, 1, 2]}
    past |= {"streamed_bytes": [0, streamed[0], sum(streamed)]}
    base = Rank(config(num_resident=4)).status() | {"curve": curve, "history": past, "warmup_done": True, "routed": 1000}
    return advice(info(*[base | status] * ranks, **(state or {})))


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({"fault": "x"}, "Moving experts stopped (rank 0): x."),
        ({"offloaded_experts": 0}, "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."),
        ({"routed": 0}, "No routing was counted yet"),
        ({"warmup_done": False}, "Hit rate 50.0 % so far; too early to judge: the warm-up is not over"),
        ({"curve": None}, "Hit rate 50.0 % so far; too early to judge: of 256 decode steps 256 are missing"),
        ({"steps": FEW_STEPS - 1}, "Hit rate 50.0 % so far; too early to judge: of 256 decode steps 1 are missing"),
        ({"steps": FEW_STEPS, "present": 0.55, "uniform": [0.0, 0.5, 0.57, 0.9, 1.0]}, "Hit rate 55.0 % in decode steps: low"),
        ({}, "Hit rate 69.0 % in decode steps: fair, because 4 of 8 experts a layer are in VRAM, and the best choice of so"),
        ({"present": 0.1, "served": 0.75}, "Hit rate 75.0 % in decode steps: fair, because 4 of 8"),  # of late
        (
            {"present": 0.94, "uniform": [0.0, 0.5, 0.95, 0.96, 1.0]},
            "Hit rate 94.0 % in decode steps: high, and about the best",
        ),
    ],
)
def test_the_first_line_is_the_verdict(figures, verdict):
    assert judged(**figures)[0].startswith(verdict)


@pytest.mark.parametrize(
    ("present", "adapt", "selection", "end"),
    [
        (
            0.64,
            "warmup",
            "frequency",
            "fair, and 6.0 points below the best fixed set of as many residents, 70.0 % in hindsight.",
        ),
        (0.4, "warmup", "frequency", "--expert-offload-adapt continuous, or a longer warm-up"),
        (0.4, "warmup", "first_n", "They do not follow the traffic; with --expert-offload-adapt continuous they would."),
        (0.4, "off", "frequency", "They do not follow the traffic; with --expert-offload-adapt continuous they would."),
        (0.4, "continuous", "frequency", "a larger budget helps more."),
    ],
)
def test_badly_chosen_residents_have_a_remedy(present, adapt, selection, end):
    said = judged(present=present, adapt=adapt, state={"expert_offload_resident_selection": selection})[0]
    assert f"{100 * (0.7 - present):.1f} points below the best" in said
    assert end in said


def test_other_budgets_are_named_if_they_are_worth_it():
    more = "--expert-offload-num-resident 6, for 0.4 MiB more VRAM on each rank, would have raised the best hit rate from"
    assert judged()[1:] == [f"{more} 70.0 % to 90.0 %: 20.0 points."]
    assert "would only have raised the best hit rate from 70.0 % to 72.0 %" in judged(uniform=[0.0, 0.5, 0.7, 0.72, 1.0])[1]
    assert judged(uniform=[0.0, 0.695, 0.7, 0.9, 1.0])[2] == (
        "--expert-offload-num-resident 2 would have lowered the best hit rate by only 0.5 points, and left 0.4 MiB of each "
        "rank's VRAM to the KV cache."
    )
    of_two_ranks = judged(state={"ep_size": 2, "tp_size": 2})
    assert of_two_ranks[1].startswith("--expert-offload-num-resident 12, for 0.4 MiB")


def test_layers_that_differ_are_better_served_by_one_ranking():
    pooled = [0.0, 0.6, 0.76, 0.92, 1.0]
    assert judged(pooled=pooled)[-1].startswith("Layers differ: in the same VRAM")
    assert "6.0 points" in judged(pooled=pooled)[-1]
    already = judged(pooled=pooled, present=0.76, adapt="continuous")
    assert not any(line.startswith("Layers differ") for line in already)
    assert "reaches 76.0 %" in already[0], "not measured against the ranking that it follows"


def test_many_moves_of_late_are_told_whatever_prefill_streams():
    assert not any("Moves are" in line for moved in ((9000, 0), (0, 300)) for line in judged(moved=moved))
    said = judged(moved=(0, 1000))
    assert said[-1].startswith("Moves are 50.0 % of the bytes that were moved or read in place")
    assert "the share falls" in said[-1]
    assert judged(moved=(0, 1000), streamed=(0, 10**6)) == said
    assert "--expert-offload-adapt warmup" in judged(moved=(0, 1000), adapt="continuous")[-1]


def test_faults_and_then_evictions_come_first_with_their_ranks():
    said = judged(evicted_bytes=3 << 30, fault=FAULT, ranks=2)
    assert said[0].startswith(f"Moving experts stopped (DP rank 0): {FAULT}.")
    assert "(DP rank 1)" in said[1]
    assert said[2].startswith("About 3.00 GiB of residents were evicted from VRAM (DP rank 0)")
    assert "a larger --expert-offload-headroom-gb, fewer residents, or no other process" in said[2]
    assert said[4].startswith("Hit rate")
    assert judged(evicted_bytes=0) == judged(evicted_bytes=None) == judged()


@pytest.mark.parametrize(
    ("results", "said"),
    [
        (
            [result("static"), result("adaptive", step_seconds=0.001)],
            ["adaptive (--expert-offload-adapt continuous) spends the least time on the link"],
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

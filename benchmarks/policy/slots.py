"""Replays routing through slots, LRU, Belady and the residency policy, and lists which goals slots meet.

Takes about ten minutes on one core. All policies have the same VRAM in each layer, and `slots` has no residents. The first
half of the requests warms up, the second is scored, and state persists. Link time is the number of times that an expert
crosses the link, read or moved, whole experts all of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy.residents import adaptive, residents_at_first
from benchmarks.policy.sources import LAYER_STEP, LAYERS, REQUESTS, SEEDS, SKEWS, TOKENS, Source, sources
from benchmarks.policy.verdicts import goal, grid, ratio
from sglang_uvm_offload.replay.baselines import ReplayPolicy, Variant
from sglang_uvm_offload.replay.policies import SHIPPED, SLOTS
from sglang_uvm_offload.replay.simulator import DECISION_DELAY_POLLS, Workload, serve
from sglang_uvm_offload.residency.adaptation import INTERVAL_STEPS

BATCHES = (1, 4, 8)
RESIDENCIES = (0.125, 0.25, 0.5, 0.78)
POLICIES = (SLOTS, SHIPPED, "lru", "belady")
MEASURED_GOAL, PLAIN_GOAL, SKEWED_GOAL, CASE_GOAL = 0.88, 1.01, 0.95, 1.02
"""Link time of slots, relative to LRU's."""


@dataclass(frozen=True)
class Case:
    """One trace at one batch and residency. By policy: the hit rate, and how often an expert crosses the link in a step."""

    trace: str
    skew: float | None
    seed: int
    batch: int
    residency: float
    hit_rate: dict[str, float]
    crossings: dict[str, float]

    def to_lru(self, name: str = SLOTS) -> float:
        """Link time of the policy ``name``, relative to LRU's."""
        return ratio(self.crossings[name], self.crossings["lru"])

    @property
    def shown(self) -> str:
        return f"{self.to_lru():.3f}"

    def to_shipped(self) -> float:
        return ratio(self.crossings[SLOTS], self.crossings[SHIPPED])

    def __str__(self) -> str:
        law = "" if self.skew is None else f" skew {self.skew:g} seed {self.seed}"
        return f"{self.trace}{law}, batch {self.batch}, {self.residency:.1%}"


def policy(name: str, workload: Workload, residency: float) -> ReplayPolicy:
    if name != SHIPPED:
        return workload.policy(name, residency)
    # The manager gives the same results in twice the time (a test of the simulator holds both to that).
    shape, capacity = workload.shape, workload.capacity(residency)
    late = DECISION_DELAY_POLLS * INTERVAL_STEPS
    return Variant(adaptive(shape, capacity), residents_at_first(shape, capacity), INTERVAL_STEPS, late)


def run(source: Source, batch: int) -> list[Case]:
    """A case for each residency."""
    workload, cases = Workload.of(source.trace(), batch), []
    for residency in RESIDENCIES:
        served = {
            name: serve(name, policy(name, workload, residency), workload, residency, expert_bytes=1) for name in POLICIES
        }
        hit_rate = {name: round(one.hit_rate, 5) for name, one in served.items()}
        crossings = {name: round(one.read_bytes_per_step + one.moved_bytes_per_step, 5) for name, one in served.items()}
        cases.append(Case(source.name, source.skew, source.seed, batch, residency, hit_rate, crossings))
    return cases


def work(paths: Sequence[Path]) -> list[tuple[Source, int]]:
    return list(product(sources(paths), BATCHES))


def judge(cases: Sequence[Case]) -> list[dict[str, Any]]:
    return [
        mean_goal("on measured routing", MEASURED_GOAL, [c for c in cases if c.skew is None]),
        mean_goal("on laws of locality without hot experts", PLAIN_GOAL, [c for c in cases if c.skew == 0]),
        mean_goal("on laws with hot experts and three domains", SKEWED_GOAL, [c for c in cases if c.skew]),
        *(
            mean_goal(f"  with skew {skew:g} alone", SKEWED_GOAL, [c for c in cases if c.skew == skew])
            for skew, _ in SKEWS
            if skew
        ),
        every_goal(f"link time at most {CASE_GOAL:g} of LRU's in every case", CASE_GOAL, cases, Case.to_lru),
        every_goal(f"link time at most that of `{SHIPPED}` in every case", 1.0, cases, Case.to_shipped),
    ]


def mean_goal(where: str, limit: float, cases: Sequence[Case]) -> dict[str, Any]:
    text = where if where.startswith(" ") else f"link time at most {limit:g} of LRU's {where}, on average"
    if not cases:
        return goal(text, [], "no case")
    mean, worst = float(np.mean([case.to_lru() for case in cases])), max(cases, key=Case.to_lru)
    found = goal(text, [mean <= limit], f"mean {mean:.3f}; most {worst.to_lru():.3f} ({worst})")
    return found | {"missed": f"by {mean - limit:.3f}"}


def every_goal(text: str, limit: float, cases: Sequence[Case], of: Callable[[Case], float]) -> dict[str, Any]:
    worst, above = max(cases, key=of), [of(case) - limit for case in cases if of(case) > limit]
    found = goal(text, [of(case) <= limit for case in cases], f"{of(worst):.3f} ({worst})")
    amount = f"by {np.mean(above):.3f} on average and {max(above):.3f} at most" if above else ""
    return found | {"missed": f"in {len(above)} of {len(cases)} cases, {amount}"}


def markdown(cases: Sequence[Case]) -> str:
    goals = judge(cases)
    missed = [f"- {str(g['goal']).strip()}: {g['missed']}\n" for g in goals if not g["all"]]
    return "\n".join([
        "# Slots on measured and generated routing\n",
        "Made by `python -m benchmarks.policy slots`, whose module explains the terms. Its figures are in `slots.json`.\n",
        grid(["goal", "met", "worst case"], [[str(g["goal"]).replace("  ", "... "), g["met"], g["worst"]] for g in goals]),
        "Missed:\n" if missed else "No goal is missed.\n",
        *(["".join(missed)] if missed else []),
        "## By kind of routing\n",
        "Link time relative to LRU's, mean over traces, laws, seeds and residencies. Belady knows the future.\n",
        grid(["routing", "batch", "cases", *POLICIES], kinds(cases)),
        "## Measured\n",
        f"Every {LAYER_STEP}rd layer. Link time relative to LRU's, and LRU's hit rate in %.\n",
        grid(["trace", "batch", "in VRAM", *BESIDE_LRU], rows(c for c in cases if c.skew is None)),
        "## Laws of locality\n",
        f"{LAYERS} layers, {REQUESTS} requests of {TOKENS} tokens, mean of {len(SEEDS)} seeds. Skew is the share of a token's "
        "experts that are drawn\nfrom the favourites of its domain; a law with skew has three domains.\n",
        grid(["experts/top-k", "skew", "batch", "in VRAM", *BESIDE_LRU], rows(c for c in cases if c.skew is not None)),
    ])  # fmt: skip


BESIDE_LRU = (SLOTS, SHIPPED, "belady", "hit rate of LRU")


def kinds(cases: Sequence[Case]) -> list[list[object]]:
    groups: dict[tuple[float | None, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.skew, case.batch), []).append(case)
    return [
        [
            "measured" if skew is None else f"law, skew {skew:g}",
            batch,
            len(group),
            *(f"{np.mean([case.to_lru(name) for case in group]):.3f}" for name in POLICIES),
        ]
        for (skew, batch), group in groups.items()
    ]


def rows(cases: Iterable[Case]) -> list[list[object]]:
    """A row for the cases that differ in the seed alone."""
    same: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        law = () if case.skew is None else (f"{case.skew:g}",)
        same.setdefault((case.trace, *law, case.batch, f"{case.residency:.1%}"), []).append(case)
    return [
        [
            *head,
            *(f"{np.mean([case.to_lru(name) for case in group]):.3f}" for name in BESIDE_LRU[:-1]),
            f"{100 * np.mean([case.hit_rate['lru'] for case in group]):.1f}",
        ]
        for head, group in same.items()
    ]

"""How much of the traffic VRAM serves where experts share 2 MiB blocks: the real manager beside the best that a budget allows.

    python -m benchmarks.block_residency FOLDER_OF_TRACES [--out results/blocks]

For each shape of experts (bytes in each of a layer's tensors on a rank), trace and budget, over the counts of the whole trace:
the best experts at any byte, the best blocks, the best experts rounded to blocks, and what the manager keeps after a warm-up
over that trace. Then, over its second half: the manager with continuous adaptation, beside the best fixed choice for that half,
with these experts and with experts of one block. All figures are shares of the bytes that steps use, each expert once a step.

    OMP_NUM_THREADS=1 python -m benchmarks.block_residency --decisions [--out results/blocks]

Instead measures how long a decision of continuous adaptation takes, for ``DECISION_LAYERS`` layers of 256 experts, 8 of them
used by a token. Run it while the machine does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.adaptive import AdaptivePolicy
from sglang_uvm_offload.policy.extents import Budget, Extents
from sglang_uvm_offload.replay.simulator import Managed, Workload
from sglang_uvm_offload.residency.adaptation import BURST_SECONDS, MOVE_BYTES_PER_S
from sglang_uvm_offload.residency.model import extents_of
from sglang_uvm_offload.routing.trace import Trace

MIB = 1 << 20
SHAPES = (
    ("dsv2lite-intent", (3.0, 1.5)),
    ("gpt-oss-20b-decode", (3.5, 1.75)),
    ("dsv2lite-intent", (2.75, 1.375)),
)
BUDGETS = (0.5, 0.78)
DECISION_LAYERS, DECISION_EXPERTS, DECISION_TOP_K, DECISION_RESIDENT = 75, 256, 8, 200
DECISION_SHAPES = ((4.0,), (3.0, 1.5), (2.75, 1.375), (12.0, 6.0), (11.5, 5.75))
DECISION_STEPS = (60, 200)
"""Steps to warm up, and measured ones."""
GOAL = 0.01
"""How far below the best blocks the manager may be after a warm-up."""


@dataclass(frozen=True)
class Case:
    """One row. Shares of bytes served from VRAM."""

    trace: str
    mib: tuple[float, float]
    budget: float
    any_byte: float
    best_blocks: float
    best_experts: float
    after_warmup: float
    continuous: float
    continuous_best: float
    continuous_experts: float
    continuous_best_experts: float


class Shape:
    """Experts of ``mib`` in each of a layer's tensors, under the budget of ``num_resident`` of them in each layer."""

    def __init__(self, layers: int, experts: int, mib: tuple[float, ...], num_resident: int):
        self.tensors = [int(each * MIB) for each in mib]
        self.num_resident = num_resident
        self.layouts = [ExpertLayout(experts, nbytes) for nbytes in self.tensors]
        self.extents: Extents = extents_of([self.layouts] * layers, experts)
        self.capacity = np.full(layers, sum(layout.budget(num_resident) for layout in self.layouts))

    def best_blocks(self, counts: np.ndarray) -> float:
        """Of the best blocks of each layer."""
        none = np.zeros(len(self.extents), dtype=bool)
        density = self.extents.density(counts.astype(float))
        return self.served(counts, ranking.best(self.extents, density, self.capacity, none, ~none))

    def best_experts(self, counts: np.ndarray) -> float:
        """Of the best experts of each layer, as many as fit with all blocks that they touch."""
        hits = 0.0
        for row, capacity in zip(counts, self.capacity, strict=True):
            kept = np.zeros(row.size, dtype=bool)
            for expert in np.argsort(-row, kind="stable"):
                kept[expert] = True
                if sum(layout.taken_by(layout.holding(kept)) for layout in self.layouts) > capacity:
                    kept[expert] = False
            there = sum(layout.bytes_in(layout.holding(kept)) for layout in self.layouts)
            hits += float(row @ there)
        return hits / (float(counts.sum()) * sum(self.tensors))

    def served(self, counts: np.ndarray, extents: np.ndarray) -> float:
        return float((counts * self.extents.bytes_by_expert(extents)).sum() / (counts.sum() * sum(self.tensors)))


def any_byte(counts: np.ndarray, num_resident: int) -> float:
    return float(np.sort(counts, axis=1)[:, ::-1][:, :num_resident].sum() / counts.sum())


def after_warmup(shape: Shape, workload: Workload, counts: np.ndarray) -> float:
    """Of what the manager keeps after a warm-up over the whole trace."""
    managed = Managed(
        *(workload.shape, shape.num_resident, shape.tensors, BLOCK_BYTES), resident_selection="frequency", adapt="warmup"
    )
    for activated in (*workload.warmup, *workload.scored):
        managed.serve(activated)
    managed.manager.reselect()
    return shape.served(counts, managed.manager.target.resident_extents())


def continuous(shape: Shape, workload: Workload, block_bytes: int) -> float:
    """Of the scored half, with residents that follow the traffic."""
    managed = Managed(workload.shape, shape.num_resident, shape.tensors, block_bytes)
    for activated in workload.warmup:
        managed.serve(activated)
    return served_in(managed, workload.scored)


def served_in(managed: Managed, steps: Iterable[np.ndarray]) -> float:
    """Serves these steps, and returns the share of their bytes that was in VRAM."""
    ledger = managed.manager.ledger
    managed.manager.observer.catch_up()
    used, read = int(ledger.activated_bytes.sum()), int(ledger.zero_copy_bytes.sum())
    for activated in steps:
        managed.serve(activated)
    managed.manager.observer.catch_up()
    return 1 - (int(ledger.zero_copy_bytes.sum()) - read) / (int(ledger.activated_bytes.sum()) - used)


def case(trace: Trace, name: str, mib: tuple[float, float], budget: float) -> Case:
    workload = Workload.of(trace)
    layers, experts = workload.shape
    shape = Shape(layers, experts, mib, round(budget * experts))
    whole = Shape(layers, experts, (BLOCK_BYTES / MIB,), shape.num_resident)
    scored = workload.scored.sum(axis=0)
    counts = workload.warmup.sum(axis=0) + scored
    return Case(
        trace=name,
        mib=mib,
        budget=budget,
        any_byte=any_byte(counts, shape.num_resident),
        best_blocks=shape.best_blocks(counts),
        best_experts=shape.best_experts(counts),
        after_warmup=after_warmup(shape, workload, counts),
        continuous=continuous(shape, workload, BLOCK_BYTES),
        continuous_best=shape.best_blocks(scored),
        continuous_experts=continuous(whole, workload, BLOCK_BYTES),
        continuous_best_experts=any_byte(scored, shape.num_resident),
    )


@dataclass(frozen=True)
class Decision:
    """Median milliseconds of taking in a step's counts and deciding."""

    mib: tuple[float, ...]
    extents: int
    observe_ms: float
    decide_ms: float
    both_ms: float


def decision(mib: tuple[float, ...]) -> Decision:
    layers, experts = DECISION_LAYERS, DECISION_EXPERTS
    shape = Shape(layers, experts, mib, DECISION_RESIDENT)
    extents, everything = shape.extents, np.ones((layers, experts), dtype=bool)
    resident = extents.holding(np.broadcast_to(np.arange(experts) < DECISION_RESIDENT, (layers, experts)))
    floor = np.full(layers, DECISION_RESIDENT // 4 * sum(shape.tensors))
    policy = AdaptivePolicy(Budget(extents, np.ones(len(extents), dtype=bool), extents.total(resident), floor), everything)
    rng = np.random.default_rng(0)
    preferred = np.log(rng.dirichlet(np.full(experts, 0.3), layers) + 1e-9)
    times = []
    for _ in range(sum(DECISION_STEPS)):
        chosen = np.argpartition(-rng.gumbel(size=(layers, experts)) - preferred, DECISION_TOP_K, axis=1)[:, :DECISION_TOP_K]
        activations = np.zeros((layers, experts), dtype=np.int64)
        np.put_along_axis(activations, chosen, 1, axis=1)
        start = time.perf_counter()
        policy.observe(activations, 1)
        observed = time.perf_counter()
        moves = policy.decide(resident, BURST_SECONDS * MOVE_BYTES_PER_S)
        times.append((observed - start, time.perf_counter() - observed))
        resident = (resident | moves.promote) & ~moves.demote
    measured = [(1e3 * observe, 1e3 * decide) for observe, decide in times[DECISION_STEPS[0] :]]
    observe, decide = (statistics.median(column) for column in zip(*measured, strict=True))
    return Decision(mib, len(extents), observe, decide, statistics.median(map(sum, measured)))


def decisions_table(decisions: list[Decision], machine: str) -> str:
    lines = [
        "# The time of a decision",
        "",
        f"Made by `benchmarks/block_residency.py --decisions` on {machine}: {DECISION_LAYERS} layers of {DECISION_EXPERTS}",
        f"experts, of which {DECISION_RESIDENT} are resident. Median milliseconds, on a thread beside the steps.",
        "",
        "| MiB an expert, by tensor | extents | counts | decision | both |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in decisions:
        mib = " + ".join(f"{size:g}" for size in each.mib)
        lines.append(f"| {mib} | {each.extents} | {each.observe_ms:.1f} | {each.decide_ms:.1f} | {each.both_ms:.1f} |")
    return "\n".join(lines) + "\n"


def measure_decisions(out: Path) -> None:
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
    decisions = [decision(mib) for mib in DECISION_SHAPES]
    record = {"machine": machine, "decisions": [asdict(each) for each in decisions]}
    (out / "decisions.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "decisions.md").write_text(decisions_table(decisions, machine))


def table(cases: list[Case]) -> str:
    lines = [
        "# Residency by blocks of 2 MiB",
        "",
        "Made by `benchmarks/block_residency.py`, which explains the columns. Shares of bytes served from VRAM.",
        "",
        "| trace | MiB an expert | budget | any byte | best blocks | whole experts | after a warm-up | within a point |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in cases:
        met = "yes" if each.after_warmup >= each.best_blocks - GOAL else "no"
        shares = (each.any_byte, each.best_blocks, each.best_experts, each.after_warmup)
        lines.append(f"{_head(each)} {' | '.join(f'{share:.3f}' for share in shares)} | {met} |")
    lines += [
        "",
        "`continuous` over the second half, and the best fixed choice for that half in each layer. It follows the traffic, and",
        "shares one budget between layers, so it may exceed that.",
        "",
        "| trace | MiB an expert | budget | continuous | best blocks | difference | of one block | best | difference |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in cases:
        blocks, experts = each.continuous - each.continuous_best, each.continuous_experts - each.continuous_best_experts
        mine = f"{each.continuous:.3f} | {each.continuous_best:.3f} | {blocks:+.3f}"
        whole = f"{each.continuous_experts:.3f} | {each.continuous_best_experts:.3f} | {experts:+.3f}"
        lines.append(f"{_head(each)} {mine} | {whole} |")
    return "\n".join(lines) + "\n"


def _head(each: Case) -> str:
    return f"| {each.trace} | {each.mib[0]:g} + {each.mib[1]:g} | {each.budget:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--decisions", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "blocks")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.decisions:
        measure_decisions(arguments.out)
        return
    if arguments.traces is None:
        parser.error("the folder of traces is missing")
    cases = []
    for name, mib in SHAPES:
        trace = Trace.load(arguments.traces / f"{name}.npz")
        for budget in BUDGETS:
            cases.append(case(trace, name, mib, budget))
            print(cases[-1], flush=True)
    (arguments.out / "blocks.json").write_text(json.dumps([asdict(each) for each in cases], indent=1) + "\n")
    (arguments.out / "blocks.md").write_text(table(cases))


if __name__ == "__main__":
    main()

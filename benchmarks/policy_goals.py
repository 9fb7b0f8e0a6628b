"""Replays routing traces through the residency policies and says which goals are met.

    python benchmarks/policy_goals.py TRACE.npz [TRACE.npz ...]

Writes ``goals.json`` and ``goals.md`` below ``benchmarks/results/policy``. A step is served as a whole, with one token of each
of ``batch`` requests; the first half of the requests warms up, the second half is scored, and state persists. Step seconds
are bytes read and moved over one link; expert size and bandwidth only scale them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

from sglang_uvm_offload import references
from sglang_uvm_offload.policy import AdaptivePolicy
from sglang_uvm_offload.references import Reference, Served
from sglang_uvm_offload.trace import Trace

RESIDENCIES = (0.25, 0.5, 0.78)
BATCHES = (1, 8)
INTERVALS = (1, 2, 4, 8, 16, 32)
EXPERT_BYTES = 4 << 20
LINK_BYTES_PER_S = 50e9
SWITCH_STEPS = 512
RIVALS = ("first_n", "static", "lru", "lfu", "lfru")
SHIPPED = "adaptive"


class Adaptive:
    """The adaptive policy as a reference: it sees the counts of ``interval`` steps at a time, ``late`` steps after the last of
    them, and moves after the step. ``interval`` and ``late`` are in steps."""

    def __init__(self, shape: tuple[int, int], capacity: np.ndarray, per_layer: str, interval: int = 1, late: int = 0,
                 move_cost: float = 1.0):  # fmt: skip
        experts = np.full(shape[0], EXPERT_BYTES)
        floor = max(1, int(capacity.min()) // 4)
        self.policy = AdaptivePolicy(capacity, experts, np.ones(shape, dtype=bool), per_layer, floor, move_cost)
        self.resident = np.arange(shape[1])[None, :] < capacity[:, None]
        self.interval, self.late = interval, late
        self.step_count = 0
        self.counts = np.zeros(shape, dtype=np.int64)
        self.reports: list[tuple[int, np.ndarray]] = []

    def step(self, touched: np.ndarray) -> Served:
        hit, read, moved = touched & self.resident, touched & ~self.resident, np.zeros_like(touched)
        self.counts += touched
        self.step_count += 1
        if self.step_count % self.interval == 0:
            self.reports.append((self.step_count + self.late, self.counts.copy()))
            self.counts[:] = 0
        while self.reports and self.reports[0][0] <= self.step_count:
            self.policy.observe(self.reports.pop(0)[1], self.interval)
            plan = self.policy.plan(self.resident)
            moved |= plan.promote
            self.resident = (self.resident | plan.promote) & ~plan.demote
        return Served(hit, read, moved)


@dataclass(frozen=True)
class Result:
    trace: str
    policy: str
    residency: float
    batch: int
    coverage: float
    moves_per_step: float
    read_bytes_per_step: float
    moved_bytes_per_step: float
    step_seconds: float
    per_layer_coverage: list[float]


def replay(policy: Reference, warmup: np.ndarray, scored: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Serve both parts; of the scored one: hits a layer, experts read, experts moved."""
    for touched in warmup:
        policy.step(touched)
    hits, read, moved = np.zeros(scored.shape[1], dtype=np.int64), 0, 0
    for touched in scored:
        served = policy.step(touched)
        hits += served.hit.sum(axis=1)
        read += int(served.read.sum())
        moved += int(served.moved.sum())
    return hits, read, moved


@dataclass(frozen=True)
class Case:
    """One trace at one residency and batch."""

    trace: str
    residency: float
    batch: int
    warmup: np.ndarray
    scored: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        return self.scored.shape[1], self.scored.shape[2]

    @property
    def capacity(self) -> np.ndarray:
        return np.full(self.shape[0], round(self.residency * self.shape[1]))

    def run(self, name: str, policy: Reference) -> Result:
        hits, read, moved = replay(policy, self.warmup, self.scored)
        steps, touches = len(self.scored), self.scored.sum(axis=(0, 2))
        return Result(
            self.trace, name, self.residency, self.batch,
            coverage=float(hits.sum() / touches.sum()),
            moves_per_step=moved / steps,
            read_bytes_per_step=read * EXPERT_BYTES / steps,
            moved_bytes_per_step=moved * EXPERT_BYTES / steps,
            step_seconds=(read + moved) * EXPERT_BYTES / steps / LINK_BYTES_PER_S,
            per_layer_coverage=(hits / np.maximum(touches, 1)).tolist(),
        )  # fmt: skip


def cases(traces: dict[str, Trace]) -> Iterator[Case]:
    for name, trace in traces.items():
        for batch in BATCHES:
            warmup, scored = (trace.touched(trace.steps(part, batch)) for part in trace.split(0.5))
            for residency in RESIDENCIES:
                yield Case(name, residency, batch, warmup, scored)


def run_case(case: Case) -> list[Result]:
    results = [case.run(name, references.make(name, case.warmup, case.scored, case.capacity)) for name in references.NAMES]
    results.append(case.run(SHIPPED, Adaptive(case.shape, case.capacity, "global")))
    results.append(case.run("adaptive-uniform", Adaptive(case.shape, case.capacity, "uniform")))
    # What the same forecasts reach if moves cost nothing: how far coverage is bounded by prediction, not by moves.
    results.append(case.run("adaptive-free-moves", Adaptive(case.shape, case.capacity, "uniform", move_cost=1e-3)))
    results += [case.run(f"adaptive-{n}", Adaptive(case.shape, case.capacity, "global", n, n)) for n in INTERVALS]
    return results


def switch(traces: dict[str, Trace]) -> list[dict[str, object]]:
    """Coverage after the traffic changes from one trace to another, against an LRU that starts empty at the change: over the
    first ``SWITCH_STEPS`` steps, and over as many after them."""
    rows: list[dict[str, object]] = []
    for before, after in permutations(traces, 2):
        first, second = traces[before], traces[after]
        if (first.num_layers, first.num_experts, first.ids.shape[2]) != (
            second.num_layers, second.num_experts, second.ids.shape[2]):  # fmt: skip
            continue
        for batch in BATCHES:
            old = first.touched(first.steps(first.split(0.5)[0], batch))
            new = second.touched(second.steps(range(second.num_requests), batch))
            windows = new[:SWITCH_STEPS], new[SWITCH_STEPS : 2 * SWITCH_STEPS]
            for residency in RESIDENCIES:
                capacity = np.full(first.num_layers, round(residency * first.num_experts))
                adaptive = Adaptive(old.shape[1:], capacity, "global")
                fresh = references.make("lru", new[:0], new, capacity)
                row: dict[str, object] = {"before": before, "after": after, "batch": batch, "residency": residency}
                replay(adaptive, old, new[:0])
                for label, window in zip(("during", "after_512"), windows, strict=True):
                    for name, policy in (("adaptive", adaptive), ("lru", fresh)):
                        row[f"{name}_{label}"] = float(replay(policy, new[:0], window)[0].sum() / window.sum())
                rows.append(row)
    return rows


def decision_times() -> list[dict[str, float]]:
    """Seconds of one ``observe`` and ``plan`` on random skewed routing, median and 99th percentile of 200, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    rows = []
    for layers, experts in ((75, 256), (150, 256), (375, 256), (750, 256), (75, 2560)):
        rng = np.random.default_rng(0)
        chance = np.minimum(8 * rng.dirichlet(np.full(experts, 0.3), size=layers), 1)
        policy = Adaptive((layers, experts), np.full(layers, experts // 2), "global")
        seconds = []
        for _ in range(200):
            touched = rng.random(chance.shape) < chance
            started = time.perf_counter()
            policy.policy.observe(touched, 1)
            plan = policy.policy.plan(policy.resident)
            seconds.append(time.perf_counter() - started)
            policy.resident = (policy.resident | plan.promote) & ~plan.demote
        median, p99 = float(np.median(seconds)), float(np.quantile(seconds, 0.99))
        rows.append({"layers": layers, "experts": experts, "median": median, "p99": p99})
    os.sched_setaffinity(0, cores)
    return rows


def goal(text: str, met: list[bool], worst: str) -> dict[str, object]:
    return {"goal": text, "met": f"{sum(met)} of {len(met)}", "all": all(met), "worst": worst}


def ratio(ours: float, theirs: float) -> float:
    """``ours / theirs``, where nothing on both sides is as good as equal."""
    return ours / theirs if theirs else float("inf") if ours else 1.0


def closed(row: dict[str, Result], name: str) -> float:
    """The share of the gap in coverage between the static oracle and Belady that ``name`` closes."""
    oracle = row["static-oracle"].coverage
    return (row[name].coverage - oracle) / (row["belady"].coverage - oracle)


def judge(table: dict[tuple[str, int, float], dict[str, Result]], switches: list[dict[str, object]],
          times: list[dict[str, float]]) -> list[dict[str, object]]:  # fmt: skip
    cells = list(table.values())
    behind = [row["lru"].coverage - row[SHIPPED].coverage for row in cells]
    moves = [ratio(row[SHIPPED].moves_per_step, row["lru"].moves_per_step) for row in cells]
    ahead = [row for row in cells if row["belady"].coverage > row["static-oracle"].coverage]
    gaps, free = ([closed(row, name) for row in ahead] for name in (SHIPPED, "adaptive-free-moves"))
    best = [ratio(row[SHIPPED].step_seconds, min(row[name].step_seconds for name in RIVALS)) for row in cells]
    fixed = [ratio(row[SHIPPED].step_seconds, min(row[name].step_seconds for name in ("first_n", "static"))) for row in cells]
    by_trace = []
    for trace in dict.fromkeys(key[0] for key in table):
        rows = [row for key, row in table.items() if key[0] == trace]
        seconds = {name: sum(row[name].step_seconds for row in rows) for name in (*RIVALS, SHIPPED)}
        by_trace.append(ratio(seconds[SHIPPED], min(seconds[name] for name in RIVALS)))
    lru = [ratio(row[SHIPPED].step_seconds, row["lru"].step_seconds) for row in cells]
    total = sum(row[SHIPPED].step_seconds for row in cells) / sum(row["lru"].step_seconds for row in cells)
    uniform = [ratio(row[SHIPPED].step_seconds, row["adaptive-uniform"].step_seconds) for row in cells]
    lag = [float(row["lru_after_512"]) - float(row["adaptive_after_512"]) for row in switches]
    lag_during = [float(row["lru_during"]) - float(row["adaptive_during"]) for row in switches]
    return [
        goal("coverage at least LRU's, within 0.5 points", [b <= 0.005 for b in behind], f"{-100 * max(behind):+.2f} points"),
        goal("at most a quarter of LRU's moves", [m <= 0.25 for m in moves], f"{max(moves):.3f} of LRU's"),
        goal("half of the gap from static-oracle to Belady closed", [g >= 0.5 for g in gaps],
             f"{min(gaps):.2f} of the gap, mean {np.mean(gaps):.2f}"),
        goal("  the same forecasts, if moves cost nothing", [f >= 0.5 for f in free],
             f"{min(free):.2f} of the gap, mean {np.mean(free):.2f}"),
        goal("512 steps after a switch of domain, within 2 points of a fresh LRU", [g <= 0.02 for g in lag],
             f"{-100 * max(lag, default=0):+.2f} points"),
        goal("  during these 512 steps", [g <= 0.02 for g in lag_during], f"{-100 * max(lag_during, default=0):+.2f} points"),
        goal("step time at most the best of first_n, static, LRU, LFU, LFRU; each case", [b <= 1 for b in best],
             f"{max(best):.3f} of the best, mean {np.mean(best):.3f}"),
        goal("  summed over a trace's cases", [b <= 1 for b in by_trace], f"{max(by_trace):.3f} of the best"),
        goal("  against the policies that do not page on a miss (first_n, static)", [b <= 1 for b in fixed],
             f"{max(fixed):.3f} of the best, mean {np.mean(fixed):.3f}"),
        goal("step time at least 10 % below LRU's on average", [bool(np.mean(lru) <= 0.9)],
             f"mean {np.mean(lru):.3f} of LRU's; sum of all cases {total:.3f}"),
        goal("global never worse than uniform", [u <= 1 for u in uniform], f"{max(uniform):.4f} of uniform's step time"),
        goal("decision for 75 x 256 in at most 5 ms", [times[0]["median"] <= 5e-3],
             f"median {1e3 * times[0]['median']:.2f} ms, p99 {1e3 * times[0]['p99']:.2f} ms"),
    ]  # fmt: skip


def markdown(table: dict[tuple[str, int, float], dict[str, Result]], goals: list[dict[str, object]],
             switches: list[dict[str, object]], times: list[dict[str, float]]) -> str:  # fmt: skip
    names = [*references.NAMES, SHIPPED, "adaptive-uniform"]
    lines = ["# Residency policies on measured routing", ""]
    lines += ["| goal | cases that meet it | worst case |", "| --- | --- | --- |"]
    lines += [f"| {g['goal'].replace('  ', '... ')} | {g['met']} | {g['worst']} |" for g in goals]
    lines += [
        "",
        "Each cell: coverage in %, then bytes over the link (read and moved) in % of all touched bytes. LRU, LFU, LFRU and",
        "Belady move a miss and are served by the same transfer; the others read it, and pay for moves on top.",
        "",
    ]
    lines += ["| trace | batch | resident | " + " | ".join(names) + " |", "| --- " * (len(names) + 3) + "|"]
    for (trace, batch, residency), row in table.items():
        first = row["first_n"]
        touched = first.read_bytes_per_step / (1 - first.coverage)
        shown = []
        for name in names:
            moved = row[name].read_bytes_per_step + row[name].moved_bytes_per_step
            shown.append(f"{100 * row[name].coverage:.1f} / {100 * moved / touched:.1f}")
        lines.append(f"| {trace} | {batch} | {residency:.0%} | " + " | ".join(shown) + " |")
    lines += ["", "Counts read every n steps and n steps late; mean over all cases:", ""]
    lines += ["| n | step time / LRU's | coverage - LRU's, least | moves / LRU's, most |", "| --- | --- | --- | --- |"]
    for n in INTERVALS:
        rows = [(row[f"adaptive-{n}"], row["lru"]) for row in table.values()]
        lines.append(
            f"| {n} | {np.mean([a.step_seconds / b.step_seconds for a, b in rows]):.3f} "
            f"| {100 * min(a.coverage - b.coverage for a, b in rows):+.2f} points "
            f"| {max(a.moves_per_step / b.moves_per_step for a, b in rows):.3f} |"
        )
    lines += [
        "",
        f"After a switch of domain: coverage over the first {SWITCH_STEPS} steps, and over the next as many, in %.",
        "",
    ]
    lines += ["| from | to | batch | resident | adaptive | fresh LRU | adaptive, then | fresh LRU, then |", "| --- " * 8 + "|"]
    for row in switches:
        values = (row[k] for k in ("adaptive_during", "lru_during", "adaptive_after_512", "lru_after_512"))
        lines.append(
            f"| {row['before']} | {row['after']} | {row['batch']} | {row['residency']:.0%} | "
            + " | ".join(f"{100 * float(v):.1f}" for v in values) + " |"
        )  # fmt: skip
    lines += ["", "Seconds of one decision (observe and plan), one core:", ""]
    lines += ["| layers | experts | median ms | p99 ms |", "| --- | --- | --- | --- |"]
    lines += [f"| {t['layers']} | {t['experts']} | {1e3 * t['median']:.2f} | {1e3 * t['p99']:.2f} |" for t in times]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "policy")
    args = parser.parse_args()
    traces = {path.stem: Trace.load(path) for path in args.traces}
    times = decision_times()
    table = {}
    for case in cases(traces):
        started = time.perf_counter()
        results = run_case(case)
        table[case.trace, case.batch, case.residency] = {result.policy: result for result in results}
        shown = "  ".join(f"{r.policy} {r.coverage:.3f} {1e3 * r.step_seconds:.2f} ms" for r in results[:9])
        print(
            f"{case.trace} batch {case.batch} {case.residency:.0%}: {shown}  ({time.perf_counter() - started:.0f} s)",
            flush=True,
        )
    switches = switch(traces)
    goals = judge(table, switches, times)
    for line in goals:
        print(f"{line['met']:>9}  {line['goal']}  (worst: {line['worst']})")
    args.out.mkdir(parents=True, exist_ok=True)
    report = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "goals": goals,
        "results": [asdict(result) for row in table.values() for result in row.values()],
        "switches": switches,
        "decision_seconds": times,
    }
    (args.out / "goals.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "goals.md").write_text(markdown(table, goals, switches, times))


if __name__ == "__main__":
    main()

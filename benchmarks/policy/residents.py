"""Replays routing traces through the shipped policy and its rivals, and lists which goals are met.

Writes ``goals.md``; with ``--tunings`` also ``tunings.md`` (what the policy's constants are worth: hours), with
``--decisions`` also ``decisions.md`` (what a decision takes; needs a quiet machine). The simulator serves each trace: a step
has one token of each of ``batch`` requests, the first half of the requests warms up, the second half is scored, and state
persists. The shipped policy is the real manager with ``--expert-offload-adapt continuous``. Step seconds are bytes read and
moved over one link; expert size and bandwidth only scale them.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields, replace
from itertools import permutations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy.decayed_counts import DecayedCounts
from benchmarks.policy.verdicts import goal, grid, ratio
from sglang_uvm_offload.policy.forecast import TUNING, Tuning
from sglang_uvm_offload.replay import baselines
from sglang_uvm_offload.replay.baselines import Variant
from sglang_uvm_offload.replay.policies import EXPERT_BYTES, SHIPPED
from sglang_uvm_offload.replay.simulator import DECISION_DELAY_POLLS, Replay, Workload, serve
from sglang_uvm_offload.replay.whole_experts import WholeExperts
from sglang_uvm_offload.residency.adaptation import INTERVAL_STEPS
from sglang_uvm_offload.routing.trace import Trace

RESIDENCIES = (0.25, 0.5, 0.78)
BATCHES = (1, 8)
INTERVALS = (2, 4, 8, 16)
FACTORS = (0.5, 2.0)
SWITCH_STEPS = 512
DECISION_SIZES = ((75, 256), (150, 256), (375, 256), (750, 256), (75, 2560))
DECISIONS = 200
DECAY_STEPS = (16, 32, 64, 128, 256, 512)
DECAY_THRESHOLDS = (1.5, 3.0)
RIVALS = ("first_n", "static", "lru", "lfu", "lfru")
FREE_MOVES, AT_ONCE, ALONE = (f"{SHIPPED}-{what}" for what in ("free-moves", "at-once", "alone"))

Case = tuple[str, int, float]
"""Trace, batch, residency."""
Table = dict[Case, dict[str, Replay]]
"""Of each case, the result of each policy."""


def adaptive(shape: tuple[int, int], capacity: np.ndarray, move_cost: float = 1.0, tuning: Tuning = TUNING) -> WholeExperts:
    """The policy that ``Adaptation`` makes, or one with other settings."""
    return WholeExperts(*layers_of(shape, capacity), move_cost, tuning)


def layers_of(shape: tuple[int, int], capacity: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The arguments that ``Adaptation`` gives a policy."""
    return capacity, np.full(shape[0], EXPERT_BYTES), np.ones(shape, dtype=bool), max(1, int(capacity.min()) // 4)


def policies(workload: Workload, residency: float, with_tunings: bool) -> dict[str, WholeExperts]:
    """Beside the shipped policy: the same without coactivation, decayed counts, and the tunings."""
    shape, capacity = workload.shape, workload.capacity(residency)
    out = {ALONE: adaptive(shape, capacity, tuning=replace(TUNING, directions=0))}
    for name, (steps, threshold) in decays().items():
        out[name] = DecayedCounts(*layers_of(shape, capacity), steps, threshold)
    if with_tunings:
        # What the same forecasts reach if moves cost nothing: how far hit rate is bounded by prediction, not by moves.
        out[FREE_MOVES] = adaptive(shape, capacity, move_cost=1e-3)
        out |= {name: adaptive(shape, capacity, tuning=tuning) for name, tuning in tunings().items()}
    return out


def intervals(workload: Workload, residency: float) -> dict[str, Variant]:
    """The shipped policy, polling at other intervals."""
    shape, capacity = workload.shape, workload.capacity(residency)
    start = residents_at_first(shape, capacity)
    out = {AT_ONCE: Variant(adaptive(shape, capacity), start, interval=1)}
    return out | {f"every-{n}": Variant(adaptive(shape, capacity), start, n, DECISION_DELAY_POLLS * n) for n in INTERVALS}


def residents_at_first(shape: tuple[int, int], capacity: np.ndarray) -> np.ndarray:
    return np.arange(shape[1])[None, :] < capacity[:, None]


def decays() -> dict[str, tuple[int, float]]:
    """Time constant and threshold of ``DecayedCounts``, by name."""
    return {f"{steps} steps, {threshold:g}": (steps, threshold) for steps, threshold in product(DECAY_STEPS, DECAY_THRESHOLDS)}


def tunings() -> dict[str, Tuning]:
    """Each constant of the policy by each of ``FACTORS``, under the name ``constant xFACTOR``."""
    constants = [field.name for field in fields(Tuning)]
    values = {c: getattr(TUNING, c) for c in constants}
    return {f"{c} x{f:g}": replace(TUNING, **{c: type(values[c])(f * values[c])}) for c, f in product(constants, FACTORS)}


def run_case(trace: Trace, batch: int, residency: float, with_tunings: bool = False) -> dict[str, Replay]:
    workload = Workload.of(trace, batch)
    start = residents_at_first(workload.shape, workload.capacity(residency))
    late = DECISION_DELAY_POLLS * INTERVAL_STEPS
    served = {name: workload.policy(name, residency) for name in (*baselines.NAMES, SHIPPED)}
    served |= {
        name: Variant(policy, start, INTERVAL_STEPS, late)
        for name, policy in policies(workload, residency, with_tunings).items()
    }
    if with_tunings:
        served |= intervals(workload, residency)
    return {name: serve(name, policy, workload, residency) for name, policy in served.items()}


def run_cases(traces: dict[str, Trace], jobs: int, with_tunings: bool) -> Table:
    cases = list(product(traces, BATCHES, RESIDENCIES))
    arguments = (
        [traces[name] for name, _, _ in cases],
        [c[1] for c in cases],
        [c[2] for c in cases],
        [with_tunings] * len(cases),
    )
    table: Table = {}
    started = time.perf_counter()
    with ProcessPoolExecutor(jobs) as pool:
        for (name, batch, residency), row in zip(cases, (pool.map if jobs > 1 else map)(run_case, *arguments), strict=True):
            table[name, batch, residency] = row
            shown = "  ".join(f"{row[p].policy} {row[p].hit_rate:.3f}" for p in (*baselines.NAMES, SHIPPED))
            print(f"{name} batch {batch} {residency:.0%}: {shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    return table


def switch(traces: dict[str, Trace]) -> list[dict[str, Any]]:
    """Hit rate after the traffic changes from one trace to another, against an LRU that starts empty at the change: over the
    first ``SWITCH_STEPS`` steps, and over as many after them. Traces of different models have no switch."""
    rows: list[dict[str, Any]] = []
    for (before, after), batch, residency in product(permutations(traces, 2), BATCHES, RESIDENCIES):
        first, second = traces[before], traces[after]
        if (first.num_layers, first.num_experts, first.ids.shape[2]) != (
            second.num_layers, second.num_experts, second.ids.shape[2]):  # fmt: skip
            continue
        old, new = Workload.of(first, batch).warmup, Workload.of(second, batch, 0.0).scored
        during = Workload(batch, new[:0], new[:SWITCH_STEPS])
        then = Workload(batch, new[:0], new[SWITCH_STEPS : 2 * SWITCH_STEPS])
        row: dict[str, Any] = {"before": before, "after": after, "batch": batch, "residency": residency}
        for name in (SHIPPED, "lru"):
            policy = during.policy(name, residency)
            warm = Workload(batch, old if name == SHIPPED else old[:0], during.scored)
            row[f"{name}_during"] = serve(name, policy, warm, residency).hit_rate
            row[f"{name}_after_512"] = serve(name, policy, then, residency).hit_rate
        rows.append(row)
    return rows


def decision_times() -> list[dict[str, float]]:
    """CPU seconds of one ``observe`` and ``decide`` on random skewed routing, median and 99th percentile, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        # In a new process: numpy's BLAS starts a thread for each core that it finds when it is loaded.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as one_core:
            return one_core.submit(times_of_decisions, DECISION_SIZES, DECISIONS).result()
    finally:
        os.sched_setaffinity(0, cores)


def times_of_decisions(sizes: Sequence[tuple[int, int]], decisions: int) -> list[dict[str, float]]:
    rows = []
    for layers, experts in sizes:
        rng = np.random.default_rng(0)
        chance = np.minimum(8 * rng.dirichlet(np.full(experts, 0.3), size=layers), 1)
        capacity = np.full(layers, experts // 2)
        policy = adaptive((layers, experts), capacity)
        resident = np.arange(experts)[None, :] < capacity[:, None]
        seconds = []
        for _ in range(decisions):
            activated = rng.random(chance.shape) < chance
            started = time.process_time()
            policy.observe(activated, 1)
            moves = policy.decide(resident)
            seconds.append(time.process_time() - started)
            resident = (resident | moves.promote) & ~moves.demote
        median, p99 = float(np.median(seconds)), float(np.quantile(seconds, 0.99))
        rows.append({"layers": layers, "experts": experts, "median": median, "p99": p99})
    return rows


def link_time(table: Table, name: str, trace: str) -> float:
    """Link time of ``name`` on ``trace`` relative to the shipped policy's, mean over the trace's cases."""
    rows = [row for case, row in table.items() if case[0] == trace]
    return float(np.mean([ratio(row[name].step_seconds, row[SHIPPED].step_seconds) for row in rows]))


def left_out(table: Table, names: Sequence[str]) -> dict[str, str]:
    """For each trace: which of the policies ``names`` takes the least link time on the *other* traces."""
    traces = list(dict.fromkeys(case[0] for case in table))
    chosen = {}
    for trace in traces:
        others = [other for other in traces if other != trace] or traces
        chosen[trace] = min(names, key=lambda name: float(np.mean([link_time(table, name, other) for other in others])))
    return chosen


def beside_decayed(table: Table) -> list[dict[str, Any]]:
    """For each trace and batch: the shipped policy beside ``DecayedCounts`` with the constants that are best on the *other*
    traces, and with those that are best on this trace and batch."""
    rows: list[dict[str, Any]] = []
    chosen = left_out(table, list(decays()))
    for trace, batch in dict.fromkeys(case[:2] for case in table):
        cells = [row for case, row in table.items() if case[:2] == (trace, batch)]
        times = {
            name: float(np.mean([ratio(c[SHIPPED].step_seconds, c[name].step_seconds) for c in cells])) for name in decays()
        }
        hindsight = max(times, key=lambda name: times[name])
        name = chosen[trace]
        rows.append({
            "trace": trace,
            "batch": batch,
            "decayed": name,
            "hit_rate": float(np.mean([c[SHIPPED].hit_rate - c[name].hit_rate for c in cells])),
            "moves": float(np.mean([ratio(c[SHIPPED].moves_per_step, c[name].moves_per_step) for c in cells])),
            "link_time": times[name],
            "hindsight": hindsight,
            "hindsight_hit_rate": float(np.mean([c[SHIPPED].hit_rate - c[hindsight].hit_rate for c in cells])),
            "hindsight_link_time": times[hindsight],
        })  # fmt: skip
    return rows


def closed(row: dict[str, Replay], name: str) -> float:
    """The share of the gap in hit rate between the static oracle and Belady that ``name`` closes."""
    oracle = row["static-oracle"].hit_rate
    return (row[name].hit_rate - oracle) / (row["belady"].hit_rate - oracle)


def judge(table: Table, switches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    cells = list(table.values())
    behind = [row["lru"].hit_rate - row[SHIPPED].hit_rate for row in cells]
    moves = [ratio(row[SHIPPED].moves_per_step, row["lru"].moves_per_step) for row in cells]
    ahead = [row for row in cells if row["belady"].hit_rate > row["static-oracle"].hit_rate]
    gaps = [closed(row, SHIPPED) for row in ahead]
    best = [ratio(row[SHIPPED].step_seconds, min(row[name].step_seconds for name in RIVALS)) for row in cells]
    fixed = [ratio(row[SHIPPED].step_seconds, min(row[name].step_seconds for name in ("first_n", "static"))) for row in cells]
    by_trace = []
    for trace in dict.fromkeys(case[0] for case in table):
        rows = [row for case, row in table.items() if case[0] == trace]
        seconds = {name: sum(row[name].step_seconds for row in rows) for name in (*RIVALS, SHIPPED)}
        by_trace.append(ratio(seconds[SHIPPED], min(seconds[name] for name in RIVALS)))
    lru = [ratio(row[SHIPPED].step_seconds, row["lru"].step_seconds) for row in cells]
    lru_alone = [ratio(row[ALONE].step_seconds, row["lru"].step_seconds) for row in cells]
    total = sum(row[SHIPPED].step_seconds for row in cells) / sum(row["lru"].step_seconds for row in cells)
    decayed_of = left_out(table, list(decays()))
    decayed = [ratio(row[SHIPPED].step_seconds, row[decayed_of[case[0]]].step_seconds) for case, row in table.items()]
    lag = [float(row["lru_after_512"]) - float(row["adaptive_after_512"]) for row in switches]
    lag_during = [float(row["lru_during"]) - float(row["adaptive_during"]) for row in switches]
    return [
        goal("hit rate at least LRU's, within 0.5 points", [b <= 0.005 for b in behind], f"{-100 * max(behind):+.2f} points"),
        goal("at most a quarter of LRU's moves", [m <= 0.25 for m in moves], f"{max(moves):.3f} of LRU's"),
        goal("half of the gap from static-oracle to Belady closed", [g >= 0.5 for g in gaps],
             f"{min(gaps, default=1):.2f} of the gap, mean {np.mean(gaps or [1]):.2f}"),
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
        goal("  from each expert's own past alone, without the context", [bool(np.mean(lru_alone) <= 0.9)],
             f"mean {np.mean(lru_alone):.3f} of LRU's"),
        goal("step time at most that of decayed counts", [d <= 1 for d in decayed],
             f"{max(decayed):.3f} of theirs, mean {np.mean(decayed):.3f}"),
    ]  # fmt: skip


def markdown(table: Table, goals: list[dict[str, Any]], switches: list[dict[str, Any]]) -> str:
    parts = [
        "# Residency policies on measured routing\n",
        "Constants and intervals: [tunings.md](tunings.md). Decision times: [decisions.md](decisions.md).\n",
        grid(["goal", "cases that meet it", "worst case"],
             [[str(g["goal"]).replace("  ", "... "), g["met"], g["worst"]] for g in goals]),
        f"`{SHIPPED}` is `--expert-offload-adapt continuous`: the real manager with `INTERVAL_STEPS` {INTERVAL_STEPS}. It\n"
        f"follows the counts {DECISION_DELAY_POLLS} poll late: a decision made beside a step, on all steps before it, takes\n"
        "effect before the next one. Each cell: hit rate in %, then bytes over the link (read and moved) in % of the bytes of\n"
        "all activations. LRU, LFU, LFRU and Belady move a miss and are served by the same transfer; the others read it, and\n"
        "pay for moves on top.\n",
        hit_rate_table(table),
        "## What the forecast adds to decayed counts\n",
        decayed_text(table),
        f"After a switch of domain: hit rate over the first {SWITCH_STEPS} steps, and over the next as many, in %.\n",
        switch_table(switches),
    ]  # fmt: skip
    return "\n".join(parts)


def decayed_text(table: Table) -> str:
    thresholds = " or ".join(f"{threshold:g}" for threshold in DECAY_THRESHOLDS)
    traces = Counter((batch, residency) for _, batch, residency in table)
    cases = ", ".join(f"batch {batch} at {residency:.0%} ({n} traces)" for (batch, residency), n in sorted(traces.items()))
    return (
        "The simplest rule that follows the traffic counts each expert's activations, decayed with one time constant. An\n"
        "expert replaces the weakest resident if its count is larger by a threshold. Budget, floor, interval and lateness are\n"
        f"those of `{SHIPPED}`. Its constants are the ones of {len(decays())} (time constant {DECAY_STEPS[0]} to\n"
        f"{DECAY_STEPS[-1]} steps, threshold {thresholds}) that take the least link time on the *other* traces. On the right\n"
        "are the ones that are best for the row itself, which cannot be known beforehand. Each figure compares\n"
        f"`{SHIPPED}` with it, mean over the residencies: points of hit rate gained, moves and bytes over the link relative\n"
        f"to its own. Step time here is bytes over the link.\n\nCases: {cases}.\n\n"
    ) + decayed_table(table)


def tunings_markdown(table: Table) -> str:
    ahead = [row for row in table.values() if row["belady"].hit_rate > row["static-oracle"].hit_rate]
    free = [closed(row, FREE_MOVES) for row in ahead]
    parts = [
        "# What the residency policy's constants are worth\n",
        "How often it polls, and how late it follows, in steps. Mean over all cases; least; most:\n",
        interval_table(table),
        f"If moves cost nothing, the same forecasts close {min(free, default=1):.2f} of the gap from static-oracle to Belady\n"
        f"at least, and {np.mean(free or [1]):.2f} on average.\n",
        *tuning_tables(table),
    ]
    return "\n".join(parts)


def decisions_markdown(times: Sequence[dict[str, float]]) -> str:
    return "\n".join([
        "# What a decision of the residency policy takes\n",
        "CPU milliseconds of one decision (observe and decide), one core:\n",
        grid(["layers", "experts", "median", "p99"],
             [[t["layers"], t["experts"], f"{1e3 * t['median']:.2f}", f"{1e3 * t['p99']:.2f}"] for t in times]),
    ])  # fmt: skip


def hit_rate_table(table: Table) -> str:
    names, rows = [*baselines.NAMES, SHIPPED], []
    for (trace, batch, residency), row in table.items():
        first = row["first_n"]
        activated = first.read_bytes_per_step / (1 - first.hit_rate)
        moved = {name: row[name].read_bytes_per_step + row[name].moved_bytes_per_step for name in names}
        cells = [f"{100 * row[name].hit_rate:.1f} / {100 * moved[name] / activated:.1f}" for name in names]
        rows.append([trace, batch, f"{residency:.0%}", *cells])
    return grid(["trace", "batch", "resident", *names], rows)


def decayed_table(table: Table) -> str:
    rows = []
    for row in beside_decayed(table):
        hit_rate, best = f"{100 * float(row['hit_rate']):+.2f}", f"{100 * float(row['hindsight_hit_rate']):+.2f}"
        rows.append([
            row["trace"], row["batch"], row["decayed"], hit_rate, f"{row['moves']:.2f}", f"{row['link_time']:.3f}",
            row["hindsight"], best, f"{row['hindsight_link_time']:.3f}",
        ])  # fmt: skip
    return grid(["trace", "batch", "decayed", "points", "moves", "bytes", "best in hindsight", "points", "bytes"], rows)


def interval_table(table: Table) -> str:
    late_by = {AT_ONCE: (1, 0), SHIPPED: (INTERVAL_STEPS, DECISION_DELAY_POLLS * INTERVAL_STEPS)}
    late_by |= {f"every-{n}": (n, DECISION_DELAY_POLLS * n) for n in INTERVALS}
    rows = []
    for name, (steps, late) in late_by.items():
        pairs = [(row[name], row["lru"]) for row in table.values()]
        rows.append([
            steps,
            late,
            f"{np.mean([ratio(a.step_seconds, b.step_seconds) for a, b in pairs]):.3f}",
            f"{100 * min(a.hit_rate - b.hit_rate for a, b in pairs):+.2f} points",
            f"{max(ratio(a.moves_per_step, b.moves_per_step) for a, b in pairs):.3f}",
        ])  # fmt: skip
    return grid(["polls every", "late by", "link time / LRU's", "hit rate - LRU's", "moves / LRU's"], rows)


def tuning_tables(table: Table) -> list[str]:
    traces = list(dict.fromkeys(case[0] for case in table))
    constants = [field.name for field in fields(Tuning)]
    rows: list[list[object]] = []
    for name, tuning in tunings().items():
        times = [link_time(table, name, trace) for trace in traces]
        constant = name.split()[0]
        rows.append([
            f"`{constant}`", f"{getattr(TUNING, constant):g}", f"{getattr(tuning, constant):g}",
            *(f"{time:.3f}" for time in times), f"{np.mean(times):.3f}",
        ])  # fmt: skip
    choices = {f"`{constant}`": [name for name in tunings() if name.split()[0] == constant] for constant in constants}
    choices["any"] = list(tunings())
    return [
        "What the policy's constants are worth: link time with one of them halved or doubled, relative to the shipped value,\n"
        "mean over a trace's cases. (`PREFILL_PRIOR_STEPS` is not among them: the traces hold decode steps only.)\n",
        grid(["constant", "shipped", "instead", *traces, "mean"], rows),
        "Leave one trace out: the value that is best on all the *other* traces, and the link time it then has on the one left\n"
        "out, relative to the shipped value. Below 1 the others would have chosen better than the shipped value.\n",
        grid(["constant", *traces], [
            [constant, *(f"{short(name)}: {link_time(table, name, trace):.3f}" for trace, name in chosen)]
            for constant, chosen in ((c, left_out(table, [SHIPPED, *names]).items()) for c, names in choices.items())
        ]),
    ]  # fmt: skip


def short(name: str) -> str:
    return "as shipped" if name == SHIPPED else name


def switch_table(switches: list[dict[str, Any]]) -> str:
    keys = (f"{SHIPPED}_during", "lru_during", f"{SHIPPED}_after_512", "lru_after_512")
    rows = [
        [row["before"], row["after"], row["batch"], f"{row['residency']:.0%}", *(f"{100 * row[key]:.1f}" for key in keys)]
        for row in switches
    ]
    return grid(["from", "to", "batch", "resident", SHIPPED, "fresh LRU", f"{SHIPPED}, then", "fresh LRU, then"], rows)


def as_json(case: Case, result: Replay) -> dict[str, Any]:
    """``result`` without what is long, rounded."""
    kept = {key: value for key, value in asdict(result).items() if key not in ("per_layer_hit_rate", "hit_rate_over_time")}
    return {"trace": case[0], **{key: float(f"{v:.7g}") if isinstance(v, float) else v for key, v in kept.items()}}


def write(
    traces: dict[str, Trace], out: Path, jobs: int, with_tunings: bool, with_decisions: bool, every_figure: Path | None
) -> None:
    times = decision_times() if with_decisions else []
    table = run_cases(traces, jobs, with_tunings)
    switches = switch(traces)
    goals = judge(table, switches)
    for line in goals:
        print(f"{line['met']:>9}  {line['goal']}  (worst: {line['worst']})")
    (out / "goals.md").write_text(markdown(table, goals, switches))
    if with_tunings:
        (out / "tunings.md").write_text(tunings_markdown(table))
    if with_decisions:
        (out / "decisions.md").write_text(decisions_markdown(times))
    if every_figure is not None:
        report = {
            "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
            "goals": goals,
            "beside_decayed": beside_decayed(table),
            "switches": switches,
            "decision_seconds": times,
            "results": [as_json(case, result) for case, row in table.items() for result in row.values()],
        }
        every_figure.write_text(json.dumps(report, indent=1) + "\n")

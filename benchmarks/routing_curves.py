"""Computes hit rates of measured routing for the planner: ``python -m benchmarks.routing_curves TRACE.npz...``

Writes ``sglang_uvm_offload/plan/routing_curves.json``, which ships with the package. For each trace and number of concurrent
requests it gives the share of a layer's activations that residents serve, by the share of experts that are resident. Traces
that ``SOURCES`` does not name are refused: a shipped figure needs a source.

Requests are served as ``replay`` serves them: the first half warms up and the second half is judged, so no request helped to
choose the residents that it is judged with.

* *warmup* keeps the experts with the most activations in the first half (``--expert-offload-adapt warmup``).
* *continuous* is the shipped policy.
* *slots* divides the same VRAM between the residents of *warmup* and slots, as ``--expert-offload-slots auto`` does without a
  profile. With so few experts, all of it goes to slots.
* *other* keeps the residents of another trace of the same model.
* *other_slots* adds slots, which that other trace filled first.

An activation is one token's use of one expert in one layer. Tokens of a step that share an expert count separately, because the
planner derives from activations how many distinct experts a step misses.

``draft_token_weight`` weighs a further token of the same request against an independent one, when four successive tokens are
served as one step (as if drafted). ``expert_skew`` says how unevenly tokens choose among offloaded experts, in steps with one
token from each of up to 16 requests at random positions. Each is fitted so that the planner's formula misses as many experts as
the trace does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np

from sglang_uvm_offload.plan.speed import distinct
from sglang_uvm_offload.policy.ranking import top
from sglang_uvm_offload.replay.baselines import Fixed, ReplayPolicy
from sglang_uvm_offload.replay.policies import SHIPPED
from sglang_uvm_offload.replay.simulator import Workload
from sglang_uvm_offload.replay.slot_splits import SlotCache
from sglang_uvm_offload.residency.slot_split import Slots
from sglang_uvm_offload.routing.trace import Trace

OUT = Path(__file__).resolve().parents[1] / "sglang_uvm_offload" / "plan" / "routing_curves.json"
RESIDENCIES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
BATCHES = (1, 4, 16, 64)
SKEWED, SKEWED_STEPS = 16, 1000
"""Requests per step and number of steps for ``expert_skew``."""
DRAFTED = 4
"""Tokens in a step that verifies drafts."""
ESFT = "deepseek-ai/ESFT results/expert_scores at commit 579a7711, MIT"
DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe", "glm_moe_dsa")
"""Model types with experts like DeepSeek's: many small ones, 6 or 8 per token, and a shared one."""


@dataclass(frozen=True)
class Source:
    """Where a trace comes from, and the model types that it represents."""

    model: str
    families: tuple[str, ...]
    text: str


SOURCES = {
    "dsv2lite-intent": Source("DeepSeek-V2-Lite", DEEPSEEK, ESFT),
    "dsv2lite-summary": Source("DeepSeek-V2-Lite", DEEPSEEK, ESFT),
    "dsv2lite-translation": Source("DeepSeek-V2-Lite", DEEPSEEK, ESFT),
    "gpt-oss-20b-decode": Source(
        "gpt-oss-20b",
        ("gpt_oss",),
        "AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting at commit 72b368f6, Apache-2.0",
    ),
}


def uses(trace: Trace, steps: np.ndarray) -> np.ndarray:
    """Returns ``int16[steps, layers, experts]``: how many tokens of each step use each expert."""
    counts = np.zeros((len(steps), trace.num_layers, trace.num_experts), dtype=np.int16)
    layers = np.arange(trace.num_layers)[None, :, None]
    for slot in range(steps.shape[1]):
        running = np.flatnonzero(steps[:, slot] >= 0)
        counts[running[:, None, None], layers, trace.ids[steps[running, slot]]] += 1
    return counts


def most_used(activated: np.ndarray, residents: int) -> np.ndarray:
    """Returns ``bool[layers, experts]``: each layer's ``residents`` experts with the most activations."""
    nothing = np.zeros(activated.shape[1:], dtype=bool)
    return top(activated.sum(axis=0, dtype=float), np.full(len(nothing), residents), nothing, ~nothing)


def hit_rate(policy: ReplayPolicy, warmup: np.ndarray, scored: np.ndarray, counts: np.ndarray) -> float:
    """Returns the share of the scored activations ``counts`` that ``policy`` serves from VRAM after the warm-up steps."""
    for activated in warmup:
        policy.step(activated)
    served = sum(int(count[policy.step(activated).hit].sum()) for activated, count in zip(scored, counts, strict=True))
    return served / int(counts.sum())


def with_slots(activated: np.ndarray, rows: int) -> SlotCache:
    """Divides each layer's ``rows`` in VRAM between slots and the most activated experts."""
    layers, experts = activated.shape[1:]
    slots = Slots(None).of(rows, experts)
    return SlotCache((layers, experts), slots, most_used(activated, rows - slots))


def policies(workload: Workload, residency: float) -> dict[str, ReplayPolicy]:
    rows = int(workload.capacity(residency)[0])
    return {
        "warmup": Fixed(most_used(workload.warmup, rows)),
        "continuous": workload.policy(SHIPPED, residency),
        "slots": with_slots(workload.warmup, rows),
    }


def curves(name: str, trace: Trace, batches: Sequence[int] = BATCHES) -> Iterator[dict[str, Any]]:
    """Yields a curve for each number of requests that the judged half of the trace can run at once."""
    judged = trace.split(0.5)[1]
    for batch in (batch for batch in batches if batch <= len(judged)):
        workload = Workload.of(trace, batch)
        counts = uses(trace, trace.steps(judged, batch))
        found: dict[str, list[float]] = {}
        for residency in RESIDENCIES:
            for policy, served in policies(workload, residency).items():
                found.setdefault(policy, []).append(round(hit_rate(served, workload.warmup, workload.scored, counts), 3))
        yield {"traces": [name], "requests": batch, **found}


def other(traces: dict[str, Trace], model: str) -> Iterator[dict[str, Any]]:
    """Judges residents of one trace on the second half of another trace of the same model: the mean over all pairs."""
    names = [name for name in traces if SOURCES[name].model == model]
    if len(names) < 2:
        return
    all_steps = {name: traces[name].activated(traces[name].steps(range(traces[name].num_requests), 1)) for name in names}
    judged = {name: uses(traces[name], traces[name].steps(traces[name].split(0.5)[1], 1)) for name in names}
    found: dict[str, list[float]] = {"other": [], "other_slots": []}
    for residency in RESIDENCIES:
        rates: dict[str, list[float]] = {policy: [] for policy in found}
        for a, b in permutations(names, 2):
            rows = round(residency * judged[b].shape[2])
            rates["other"].append((judged[b] * most_used(all_steps[a], rows)).sum() / judged[b].sum())
            rates["other_slots"].append(hit_rate(with_slots(all_steps[a], rows), all_steps[a], judged[b] > 0, judged[b]))
        for policy, of_pairs in rates.items():
            found[policy].append(round(float(np.mean(of_pairs)), 3))
    yield {"traces": names, "requests": 1, **found}


def draft_token_weight(trace: Trace, residency: float = 0.5) -> float:
    """See the module's docstring."""
    first, judged = trace.split(0.5)
    resident = most_used(trace.activated(trace.steps(first, 1)), round(residency * trace.num_experts))
    ends = np.cumsum(trace.seq_len)
    starts = [range(ends[r] - trace.seq_len[r], ends[r] - DRAFTED + 1, DRAFTED) for r in judged]
    steps = np.array([range(start, start + DRAFTED) for span in starts for start in span])
    missed = float((trace.activated(steps) & ~resident).sum(axis=2).mean())
    counts = uses(trace, steps)
    choices = float((counts * ~resident).sum(axis=2).mean()) / DRAFTED
    return (independent_tokens(missed, choices, trace.num_experts - int(resident[0].sum())) - 1) / (DRAFTED - 1)


def expert_skew(trace: Trace, residency: float = 0.5) -> float:
    """See the module's docstring."""
    first, judged = trace.split(0.5)
    resident = most_used(trace.activated(trace.steps(first, 1)), round(residency * trace.num_experts))
    random, ends = np.random.default_rng(0), np.cumsum(trace.seq_len)
    requests = [random.choice(judged, min(SKEWED, len(judged)), replace=False) for _ in range(SKEWED_STEPS)]
    steps = np.array([ends[some] - random.integers(1, trace.seq_len[some] + 1) for some in requests])
    missed = float((trace.activated(steps) & ~resident).sum(axis=2).mean())
    choices = float((uses(trace, steps) * ~resident).sum(axis=2).mean()) / steps.shape[1]
    offloaded = trace.num_experts - int(resident[0].sum())
    low, high = 0.0, 100.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(offloaded, choices, steps.shape[1], middle) > missed else (low, middle)
    return low


def independent_tokens(missed: float, choices: float, offloaded: int) -> float:
    """Returns how many independent tokens, each choosing ``choices`` of the ``offloaded`` experts, miss ``missed`` of them."""
    low, high = 0.0, 1000.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if distinct(offloaded, choices, middle) < missed else (low, middle)
    return low


def record(path: Path, trace: Trace) -> dict[str, Any]:
    source = SOURCES[path.stem]
    return {
        "model": source.model,
        "families": source.families,
        "experts": trace.num_experts,
        "top_k": int(trace.ids.shape[2]),
        "requests": trace.num_requests,
        "tokens": len(trace.ids),
        "draft_token_weight": round(draft_token_weight(trace), 2),
        "expert_skew": round(expert_skew(trace), 2),
        "source": source.text,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    wanted = parser.parse_args(arguments)
    unknown = [path.stem for path in wanted.traces if path.stem not in SOURCES]
    if unknown:
        parser.error(f"no source is recorded for {', '.join(unknown)}; SOURCES has {', '.join(SOURCES)}")
    traces = {path.stem: Trace.load(path) for path in sorted(wanted.traces)}
    measured = [curve for name, trace in traces.items() for curve in curves(name, trace)]
    measured += [curve for model in sorted({SOURCES[name].model for name in traces}) for curve in other(traces, model)]
    content = {
        "made_by": "benchmarks/routing_curves.py",
        "residencies": RESIDENCIES,
        "traces": {path.stem: record(path, traces[path.stem]) for path in sorted(wanted.traces)},
        "curves": measured,
    }
    wanted.out.write_text(text_of(content))
    return 0


def text_of(content: dict[str, Any]) -> str:
    """Formats JSON with one line per trace and curve, for readable diffs."""
    traces = ",\n".join(f"  {json.dumps(name)}: {json.dumps(trace)}" for name, trace in content["traces"].items())
    lines = ",\n".join(f"  {json.dumps(curve)}" for curve in content["curves"])
    head = f'"made_by": {json.dumps(content["made_by"])},\n"residencies": {json.dumps(content["residencies"])}'
    return f'{{\n{head},\n"traces": {{\n{traces}\n}},\n"curves": [\n{lines}\n]\n}}\n'


if __name__ == "__main__":
    raise SystemExit(main())

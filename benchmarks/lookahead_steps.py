"""Simulates the gain of lookahead within decode steps: measured routing, the slot policy, and guesses of given recall and
precision.

    python -m benchmarks.lookahead_steps TRACES benchmarks/results/lookahead

Times are in those of computing one layer. A layer waits for its misses, but for a third of each that comes while its first GEMM
runs. With lookahead the link brings guesses for the next layer whenever it has nothing else to do, one layer's compute time at
most; what a guess has brought when it proves right is missed no more. Guesses evict nothing: they come to a few rows that slots
then lack, the same ones for each layer. Wrong ones cost nothing besides, because demand goes first.

Writes ``steps.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_uvm_offload.policy.slot_policy import WHOLE, SlotPolicy, SlotPool
from sglang_uvm_offload.replay.simulator import Workload
from sglang_uvm_offload.routing.trace import Trace

TRACES = ("dsv2lite-summary", "gpt-oss-20b-decode")
RESIDENCIES, BATCHES = (0.25, 0.5, 0.78), (1, 4)
LINKS = (0.5, 1.0, 2.0)
"""Link time per expert: about 1.5 for experts of 4.5 MiB over 51 GB/s with 60 us of compute."""
FIRST_GEMM, SECOND_PART = 0.3, 1 / 3
"""Share of a layer's compute time, and of an expert's bytes."""
STAGING = 4
"""Rows, over all layers, that slots give up: more than the link brings while one layer computes."""
HANDSHAKE = 0.01
"""Time that checking guesses adds to each layer."""


@dataclass(frozen=True)
class Predictor:
    name: str
    recall: float
    """Share of misses that are guessed."""
    precision: float


PREDICTORS = (
    Predictor("published, 384 experts", 0.58, 0.67),
    Predictor("published, 128 experts, 8 a token", 0.75, 0.67),
    Predictor("published, 1.25 top-k", 0.87, 0.48),
    Predictor("measured here, 32 experts", 0.82, 0.77),
    Predictor("always right", 1.0, 1.0),
)


def misses(workload: Workload, slots: int) -> np.ndarray:
    """Returns ``int[steps, layers]`` with ``slots`` slots over all layers."""
    (layers, experts), found = workload.shape, []
    policy = SlotPolicy(np.ones((layers, experts), dtype=bool), [SlotPool(range(layers), slots)])
    for activated in (*workload.warmup, *workload.scored):
        policy.begin_step()
        hit = policy.resolve(activated, np.full(activated.shape, WHOLE)).hit
        found.append(np.count_nonzero(activated & ~hit, axis=1))
    return np.array(found[len(workload.warmup) :])


def waits(missed: np.ndarray, link: float) -> np.ndarray:
    """Returns how long layers wait for ``missed`` experts, which may be fractional."""
    return link * missed - np.minimum(link * missed * SECOND_PART, FIRST_GEMM)


def left(missed: np.ndarray, link: float, predictor: Predictor, random: np.random.Generator) -> np.ndarray:
    """Returns ``missed`` minus what guesses brought one layer ahead. The first layer has no guess."""
    wrong_mean = missed.mean() * predictor.recall * (1 - predictor.precision) / predictor.precision
    right, wrong = random.binomial(missed, predictor.recall), random.poisson(wrong_mean, missed.shape)
    remaining = missed.astype(float)
    for step, layer in np.argwhere(right > 0).tolist():
        if not layer:
            continue
        busy = min(link * remaining[step, layer - 1] * SECOND_PART, FIRST_GEMM)
        order = random.permutation(np.arange(right[step, layer] + wrong[step, layer]) < right[step, layer])
        ends = np.minimum((1 - busy) / link, np.arange(1, len(order) + 1))
        remaining[step, layer] -= np.diff(ends, prepend=0)[order].sum()
    return remaining


def gains(trace: Trace) -> Iterator[str]:
    for batch in BATCHES:
        workload = Workload.of(trace, batch)
        for residency in RESIDENCIES:
            slots = round(residency * workload.shape[1]) * workload.shape[0]
            plain, fewer = misses(workload, slots), misses(workload, slots - STAGING)
            for link in LINKS:
                random = np.random.default_rng(0)
                without = 1 + waits(plain, link).mean()
                cells = [f"{residency:.0%}", str(batch), f"{link:g}", f"{plain.sum(axis=1).mean():.1f}", f"{without:.2f}"]
                for predictor in PREDICTORS:
                    ahead = 1 + HANDSHAKE + waits(left(fewer, link, predictor, random), link).mean()
                    cells.append(f"{without / ahead:.2f}")
                yield f"| {' | '.join(cells)} |"


def page(folder: Path) -> str:
    heads = ["in VRAM", "batch", "link time of an expert", "misses/step", "layer without", *(each.name for each in PREDICTORS)]
    lines = ["# What lookahead would gain in a decode step", "", (__doc__ or "").split("\n\n")[2], ""]
    lines += ["| guesses | recall of misses | precision |", "| --- | --- | --- |"]
    lines += [f"| {each.name} | {each.recall:.2f} | {each.precision:.2f} |" for each in PREDICTORS] + [""]
    for name in TRACES:
        trace = Trace.load(folder / f"{name}.npz")
        lines += [f"## {name}: {trace.num_layers} layers of {trace.num_experts} experts", "", f"| {' | '.join(heads)} |"]
        lines += ["| --- |" + " --- |" * (len(heads) - 1), *gains(trace), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traces", type=Path, help="folder of routing traces")
    parser.add_argument("out", type=Path, help="folder for steps.md")
    args = parser.parse_args()
    (args.out / "steps.md").write_text(page(args.traces))
    sys.stdout.write((args.out / "steps.md").read_text())


if __name__ == "__main__":
    main()

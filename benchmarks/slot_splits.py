"""Replays routing with the VRAM split between residents and slots, and tables the link time of each split.

    python benchmarks/slot_splits.py [TRACE.npz ...]

Writes ``splits.json`` and ``splits.md`` below ``benchmarks/results/slots``, in some minutes on one core. Routing is that of
``slot_goals.py``, with one seed and the batches and residencies below. Residents are the most activated experts of the warm-up,
as a profile or ``frequency`` chooses them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from policy_goals import grid
from slot_goals import OUT, Source, sources

from sglang_uvm_offload.replay.simulator import slot_splits
from sglang_uvm_offload.replay.slots import SHARES

BATCHES = (1, 8)
RESIDENCIES = (0.25, 0.5, 0.78)
SEED = 0


def run(source: Source) -> Iterator[dict[str, Any]]:
    """Of each case, the link time of each split, relative to the best one."""
    trace = source.trace()
    for batch in BATCHES:
        for residency in RESIDENCIES:
            seconds = [split.step_seconds for split in slot_splits(trace, residency, batch)]
            relative = [round(one / min(seconds), 3) if min(seconds) else 1.0 for one in seconds]
            yield {
                "trace": source.name,
                "skew": source.skew,
                "batch": batch,
                "residency": residency,
                "splits": relative,
            }


def markdown(cases: Sequence[dict[str, Any]]) -> str:
    shares = [f"{share:.0%}" for share in SHARES]
    kinds: dict[str, list[list[float]]] = {}
    for case in cases:
        kinds.setdefault("measured" if case["skew"] is None else f"law, skew {case['skew']:g}", []).append(case["splits"])
    means = [[kind, len(rows), *(f"{mean:.3f}" for mean in np.mean(rows, axis=0))] for kind, rows in kinds.items()]
    rows = [
        [
            case["trace"],
            "" if case["skew"] is None else f"{case['skew']:g}",
            case["batch"],
            f"{case['residency']:.0%}",
            *(f"{one:.3f}" for one in case["splits"]),
        ]
        for case in cases
    ]
    return "\n".join([
        "# VRAM split between residents and slots\n",
        "Made by `benchmarks/slot_splits.py`. Link time of decode steps relative to the best split of the case, by the share\n"
        "of VRAM in slots. Prefill is not in it.\n",
        grid(["routing", "cases", *shares], means),
        "## By case\n",
        grid(["routing", "skew", "batch", "in VRAM", *shares], rows),
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(arguments)
    cases = []
    for source in sources(args.traces):
        if source.seed == SEED:
            cases += run(source)
            print(f"{source.name}: {cases[-1]['splits']}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases)
    (args.out / "splits.json").write_text(f"[\n{lines}\n]\n")
    (args.out / "splits.md").write_text(markdown(cases))


if __name__ == "__main__":
    main()

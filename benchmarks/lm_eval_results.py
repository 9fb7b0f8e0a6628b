"""Compares two lm_eval results (EleutherAI): each task's scores to the last digit, and the answer to each sample.

    python -m benchmarks.lm_eval_results off on

Each folder is the ``--output_path`` of runs with ``--log_samples``. If a task ran several times, the newest run counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SHOWN = 5
"""Printed differences per task."""


class NoResults(ValueError):
    """A folder holds no complete results."""


@dataclass(frozen=True)
class TaskResult:
    """One task's scores by name, and its prompts and answers by (document, filter)."""

    scores: dict[str, Any]
    samples: dict[tuple[int, str], Json]


def read(folder: Path) -> dict[str, TaskResult]:
    """Reads each task's newest result. Raises ``NoResults``."""
    found = {}
    for path in sorted(folder.rglob("results_*.json"), key=lambda path: path.name):
        date = path.stem.removeprefix("results_")
        results: Json = json.loads(path.read_text())
        for task in results["configs"]:  # groups are not listed here: they have no samples
            log = path.with_name(f"samples_{task}_{date}.jsonl")
            if not log.exists():
                raise NoResults(f"{path}: no samples of {task}; run lm_eval with --log_samples")
            samples = [json.loads(line) for line in log.read_text().splitlines()]
            scores = {name: score for name, score in results["results"][task].items() if name != "alias"}
            found[task] = TaskResult(scores, {(row["doc_id"], row["filter"]): row for row in samples})
    if not found:
        raise NoResults(f"{folder}: no results_*.json; it must be the --output_path of a run of lm_eval")
    return found


def differences(off: TaskResult, on: TaskResult) -> list[str]:
    """Lists the differences between two results of one task, one per line: samples, then scores."""
    lines = []
    for key in sorted(off.samples.keys() | on.samples.keys()):
        mine, theirs = on.samples.get(key), off.samples.get(key)
        where = f"sample {key[0]} ({key[1]})"
        if mine is None or theirs is None:
            lines.append(f"{where}: only in {'the second' if theirs is None else 'the first'} result")
        elif mine["arguments"] != theirs["arguments"]:
            lines.append(f"{where}: asked something else")
        elif mine["resps"] != theirs["resps"]:
            lines.append(f"{where}: {theirs['resps']!r} and {mine['resps']!r}")
    for name in sorted(off.scores.keys() | on.scores.keys()):
        if off.scores.get(name) != on.scores.get(name):
            lines.append(f"{name}: {off.scores.get(name)!r} and {on.scores.get(name)!r}")
    return lines


def compare(off: dict[str, TaskResult], on: dict[str, TaskResult]) -> bool:
    """Prints scores and differences. Returns whether all are equal."""
    same = off.keys() == on.keys()
    if not same:
        print(f"Tasks differ: {', '.join(off)} and {', '.join(on)}.")
    for task in [task for task in off if task in on]:
        found = differences(off[task], on[task])
        print(f"{task}: {len(off[task].samples)} samples, {'the same' if not found else f'{len(found)} differences'}")
        for name, score in off[task].scores.items():
            if "stderr" not in name and isinstance(score, float):
                print(f"    {name.removesuffix(',none'):32} {score!r:24} {on[task].scores.get(name)!r}")
        for line in found[:SHOWN]:
            print(f"    {line}")
        same = same and not found
    return same


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("off", type=Path, help="results without offloading")
    parser.add_argument("on", type=Path, help="results with offloading")
    args = parser.parse_args(arguments)
    try:
        same = compare(read(args.off), read(args.on))
    except NoResults as reason:
        parser.error(str(reason))
    print("All scores and answers are the same." if same else "The results differ.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

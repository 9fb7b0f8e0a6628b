"""Replays routing with the VRAM split between residents and slots, and tables the link time of each split.

Takes some minutes on one core. Routing has one seed. Residents are the most activated experts of the warm-up, as a profile or
``frequency`` chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.policy.sources import SEED, Source, sources
from benchmarks.policy.verdicts import grid
from sglang_uvm_offload.replay.simulator import slot_splits
from sglang_uvm_offload.replay.slots import SHARES

BATCHES = (1, 8)
RESIDENCIES = (0.25, 0.5, 0.78)


@dataclass(frozen=True)
class Case:
    """The link time of each split of ``SHARES``, relative to the best one."""

    trace: str
    skew: float | None
    batch: int
    residency: float
    splits: list[float]

    @property
    def shown(self) -> str:
        return str(self.splits)

    def __str__(self) -> str:
        return f"{self.trace}, batch {self.batch}, {self.residency:.0%}"


def work(paths: Sequence[Path]) -> list[tuple[Source]]:
    return [(source,) for source in sources(paths) if source.seed == SEED]


def run(source: Source) -> list[Case]:
    trace, cases = source.trace(), []
    for batch, residency in product(BATCHES, RESIDENCIES):
        seconds = [split.step_seconds for split in slot_splits(trace, residency, batch)]
        relative = [round(one / min(seconds), 3) if min(seconds) else 1.0 for one in seconds]
        cases.append(Case(source.name, source.skew, batch, residency, relative))
    return cases


def markdown(cases: Sequence[Case]) -> str:
    shares = [f"{share:.0%}" for share in SHARES]
    kinds: dict[str, list[list[float]]] = {}
    for case in cases:
        kinds.setdefault("measured" if case.skew is None else f"law, skew {case.skew:g}", []).append(case.splits)
    means = [[kind, len(rows), *(f"{mean:.3f}" for mean in np.mean(rows, axis=0))] for kind, rows in kinds.items()]
    rows = [
        [
            case.trace,
            "" if case.skew is None else f"{case.skew:g}",
            case.batch,
            f"{case.residency:.0%}",
            *(f"{one:.3f}" for one in case.splits),
        ]
        for case in cases
    ]
    return "\n".join([
        "# VRAM split between residents and slots\n",
        "Made by `python -m benchmarks.policy splits`. Link time of decode steps relative to the best split of the case, by\n"
        "the share of VRAM in slots. Prefill is not in it.\n",
        grid(["routing", "cases", *shares], means),
        "## By case\n",
        grid(["routing", "skew", "batch", "in VRAM", *shares], rows),
    ])  # fmt: skip

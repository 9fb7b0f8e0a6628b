"""What laying out a layer's experts by a profile, the hottest first, would gain over the checkpoint's order.

    OMP_NUM_THREADS=1 python -m benchmarks.hot_first FOLDER_OF_TRACES [--out results/layout]

Experts that are no whole blocks of 2 MiB share blocks, so a hot expert keeps parts of its cold neighbours in VRAM, and
residents that lie apart are moved span by span. Here the order of each layer's experts is made from the first half of a
traffic's requests, and judged on the second half, or on that of another traffic. The orders (``expert_orders.py``):

- ``any byte``: the checkpoint's, with blocks so small that no experts share one: the bound;
- ``checkpoint``: the checkpoint's, in blocks of 2 MiB, as are the following;
- ``hottest first``: by the steps that use an expert;
- ``co-use``: the same, and among experts about as hot those are neighbours that are used together.

Residents are chosen in three ways: ``fixed``, by the counts that made the order; ``re-selected``, by those of the judged half,
the most that a choice at once can reach on it; ``continuous``, by the manager as it serves the last ``STEPS`` of the first half
and then the first ``STEPS`` of the judged one, which alone are judged, in every third layer.

The manager's own code chooses and moves them all, over emulated memory that counts its calls. A span is what the driver moves
in one prefetch: at most ``layout.MOVE_BYTES``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

from benchmarks.block_residency import BUDGETS, MIB, SHAPES, served_in
from benchmarks.expert_orders import ANY_BYTE, ORDERS, laid_out
from benchmarks.hot_first_page import Case, Moved, page
from benchmarks.policy.sources import LAYER_STEP, shuffled
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, batches
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Span
from sglang_uvm_offload.replay.simulator import Managed, Workload
from sglang_uvm_offload.requested_config import MAX_WARMUP_TOKENS
from sglang_uvm_offload.routing.counts import Phase
from sglang_uvm_offload.routing.trace import Trace

TRACES = ("dsv2lite-intent", "dsv2lite-summary", "dsv2lite-translation", "gpt-oss-20b-decode")
MIXED, MIX = TRACES[:3], "dsv2lite, mixed"
"""The requests of one model's traces, in an order drawn by chance."""
ELSEWHERE = TRACES[0]
"""Whose order is also judged on the other traffic of its model."""
GEOMETRIES = tuple(dict.fromkeys(mib for _, mib in SHAPES))
"""MiB an expert, by tensor."""
STEPS = 1024


class CountedMemory(EmulatedMemory):
    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.moved = Moved()

    def place(self, managed: ManagedRange, spans: Sequence[Span], location: Location) -> None:
        super().place(managed, spans, location)
        self.moved.calls += 1
        self.moved.spans += sum(map(len, batches(spans)))
        self.moved.nbytes += sum(span.nbytes for span in spans)

    def since(self) -> Moved:
        """What was moved since the last call."""
        moved, self.moved = self.moved, Moved()
        return moved


@dataclass(frozen=True)
class Traffic:
    """The order of experts is made ``of`` one traffic and judged ``on`` another: ``bool[steps, layers, experts]``."""

    of: str
    on: str
    first: np.ndarray
    judged: np.ndarray


def traffics(folder: Path) -> Iterator[Traffic]:
    traces = {name: Trace.load(folder / f"{name}.npz") for name in TRACES}
    traces[MIX] = shuffled([traces[name] for name in MIXED])
    halves = {name: Workload.of(trace) for name, trace in traces.items()}
    for name, half in halves.items():
        yield Traffic(name, name, half.warmup, half.scored)
    for name in (*MIXED, MIX):
        if name != ELSEWHERE:
            yield Traffic(ELSEWHERE, name, halves[ELSEWHERE].warmup, halves[name].scored)


def cases(traffic: Traffic, order: str) -> Iterator[Case]:
    """One for each geometry and budget."""
    block_bytes = PAGE_BYTES if order == ANY_BYTE else BLOCK_BYTES
    at = ORDERS[order](traffic.first)
    first, judged = (laid_out(half.sum(axis=0), at) for half in (traffic.first, traffic.judged))
    few = [half[:, ::LAYER_STEP] for half in (traffic.first[-STEPS:], traffic.judged[:STEPS])]
    before, scored = (laid_out(half, at[::LAYER_STEP]) for half in few)
    for mib, budget in product(GEOMETRIES, BUDGETS):
        what = (traffic.of, traffic.on, mib, budget, order)
        at_once = AtOnce.of(first, judged, mib, budget, block_bytes)
        continuous, followed = following(before, scored, mib, budget, block_bytes)
        yield Case(*what, at_once.fixed, at_once.reselected, continuous, at_once.start, at_once.again, followed)


@dataclass(frozen=True)
class AtOnce:
    """What residents serve that are chosen at once, and the moves to them."""

    fixed: float
    reselected: float
    start: Moved
    again: Moved

    @classmethod
    def of(cls, first: np.ndarray, judged: np.ndarray, mib: tuple[float, ...], budget: float, block_bytes: int) -> AtOnce:
        """``first`` and ``judged``: counts int64 ``[layers, experts]``, by place."""
        memory = CountedMemory(block_bytes)
        layers, experts = first.shape
        managed = Managed(
            *((layers, experts), round(budget * experts), _bytes(mib), block_bytes, memory),
            resident_selection="frequency",
            adapt="warmup",
            warmup_tokens=MAX_WARMUP_TOKENS,
        )
        memory.since()
        count(managed, first)
        managed.manager.reselect()
        fixed, start = served(managed, judged), memory.since()
        count(managed, judged)
        managed.manager.readvise()
        return cls(fixed, served(managed, judged), start, memory.since())


def count(managed: Managed, counts: np.ndarray) -> None:
    """In one step: residents that are chosen at once depend on the sums alone."""
    manager, model = managed.manager, managed.manager.target
    assert model.counters is not None
    manager.begin_step(model, 1, 1, Phase.PREFILL)
    for layer, row in enumerate(counts):
        model.counters.count_histogram(layer, torch.from_numpy(row))
    manager.end_step(model)


def served(managed: Managed, counts: np.ndarray) -> float:
    """The share of these counts' bytes that is in VRAM."""
    assert managed.manager.fault is None, managed.manager.fault
    model = managed.manager.target
    return float((counts * model.resident_share(model.resident_extents())).sum() / counts.sum())


def following(
    before: np.ndarray, scored: np.ndarray, mib: tuple[float, ...], budget: float, block_bytes: int
) -> tuple[float, Moved]:
    """Serves both, ``bool[steps, layers, experts]`` by place, with continuous adaptation: of the ``scored`` steps, the share of
    bytes in VRAM and the moves."""
    memory = CountedMemory(block_bytes)
    layers, experts = before.shape[1:]
    managed = Managed((layers, experts), round(budget * experts), _bytes(mib), block_bytes, memory)
    for activated in before:
        managed.serve(activated)
    memory.since()
    decisions = 0

    def steps() -> Iterator[np.ndarray]:
        nonlocal decisions
        for activated in scored:
            earlier = memory.moved.calls
            yield activated
            decisions += memory.moved.calls > earlier

    share, moved = served_in(managed, steps()), memory.since()
    assert managed.manager.fault is None, managed.manager.fault
    moved.decisions = decisions
    return share, moved


def _bytes(mib: tuple[float, ...]) -> list[int]:
    return [int(each * MIB) for each in mib]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "layout")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = []
    for traffic in traffics(arguments.traces):
        for order in ORDERS:
            for case in cases(traffic, order):
                found.append(case)
                print(case, flush=True)
        (arguments.out / "layout.json").write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
        (arguments.out / "layout.md").write_text(page(found))


if __name__ == "__main__":
    main()

"""Missed bytes where experts share 2 MiB blocks: residents chosen by block or by group of experts, with slots beside them.

    python -m benchmarks.block_residency FOLDER_OF_TRACES > benchmarks/results/blocks/blocks.md

Each layer's residents are those that serve the warm-up half of a trace best. Slots then serve the following steps with the
shipped policy. A miss counts the bytes of the expert that are not in VRAM.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout, experts_of_a_group, whole_rows
from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.slot_policy import WHOLE, SlotPolicy, SlotPool
from sglang_uvm_offload.replay.simulator import Workload
from sglang_uvm_offload.residency.model import extents_of
from sglang_uvm_offload.residency.slot_split import pays_in_groups
from sglang_uvm_offload.routing.trace import Trace

MIB = 1 << 20
CASES = (
    ("dsv2lite-intent", 1, (3.0, 1.5)),
    ("dsv2lite-intent", 4, (3.0, 1.5)),
    ("gpt-oss-20b-decode", 1, (3.0, 1.5)),
    ("gpt-oss-20b-decode", 4, (3.0, 1.5)),
    ("dsv2lite-intent", 4, (3.5, 1.75)),
    ("dsv2lite-intent", 4, (11.5, 5.75)),
)
"""(trace, batch, MiB per expert in each of a layer's tensors on one rank)"""
IN_VRAM, IN_SLOTS = (0.5, 0.78), (0.0, 0.125, 0.25, 0.5, 0.75)
"""The share of experts in VRAM, and roughly the share of those that are in slots."""
WARM_STEPS, STEPS = 200, 200
"""The last ``WARM_STEPS`` of the warm-up fill the slots; the next ``STEPS`` are measured."""


@dataclass(frozen=True)
class Row:
    residents: int
    slots: int
    missed: tuple[float, float, float]
    """MiB per step with an allocator that can place any byte, with blocks, and with groups of experts."""
    in_part: tuple[float, float]
    """The share of experts that are only partly in VRAM, with blocks and with groups."""


class Residents:
    """Experts of ``mib`` in each of a layer's tensors."""

    def __init__(self, workload: Workload, mib: Sequence[float]):
        self.workload = workload
        self.counts = workload.warmup.sum(axis=0).astype(float)
        self.sizes = [int(each * MIB) for each in mib]
        self.group = whole_rows((nbytes, BLOCK_BYTES) for nbytes in self.sizes)

    def offloaded(self, number: int, block_bytes: int, group: int) -> np.ndarray:
        """Returns ``int64[layers, experts]``: each expert's bytes that stay in host RAM with the best residents."""
        layers, experts = self.workload.shape
        layouts = [ExpertLayout.grouped(experts, nbytes, block_bytes, group) for nbytes in self.sizes]
        extents = extents_of([layouts] * layers, experts)
        capacity = np.full(layers, sum(layout.budget(number) for layout in layouts))
        none = np.zeros(len(extents), dtype=bool)
        chosen = ranking.best(extents, extents.density(self.counts), capacity, none, ~none)
        return sum(self.sizes) - extents.bytes_by_expert(chosen)

    def missed(self, offloaded: np.ndarray, slots: int) -> float:
        """Returns missed MiB per step."""
        layers = len(offloaded)
        policy = SlotPolicy(np.ones_like(offloaded, dtype=bool), [SlotPool(range(layers), slots * layers)])
        share, missed = -(-offloaded * WHOLE // sum(self.sizes)), 0
        for used in self.workload.warmup[-WARM_STEPS:]:
            policy.begin_step()
            policy.resolve(used, share)
        steps = self.workload.scored[:STEPS]
        for used in steps:
            policy.begin_step()
            missed += int(offloaded[used & ~policy.resolve(used, share).hit].sum())
        return missed / len(steps) / MIB

    def row(self, rows: int, in_slots: float) -> Row:
        """Residents are whole groups."""
        residents = round(rows * (1 - in_slots)) // self.group * self.group
        slots, byte = rows - residents, self.sizes[-1] // 2
        choices = [self.offloaded(residents, *how) for how in ((byte, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES, self.group))]
        missed = [self.missed(offloaded, slots) for offloaded in choices]
        part = [float(((each > 0) & (each < sum(self.sizes))).mean()) for each in choices[1:]]
        return Row(residents, slots, (missed[0], missed[1], missed[2]), (part[0], part[1]))


def table(traces: Path) -> Iterator[str]:
    yield "| trace | batch | MiB an expert | experts | residents | slots | any byte | blocks | groups | by groups |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, batch, mib in CASES:
        of = Residents(Workload.of(Trace.load(traces / f"{name}.npz"), batch), mib)
        experts = of.workload.shape[1]
        rows = [of.row(round(share * experts), in_slots) for share in IN_VRAM for in_slots in IN_SLOTS]
        for row in dict.fromkeys(rows):
            any_byte, *of_blocks = row.missed
            parts = zip(of_blocks, row.in_part, strict=True)
            each = " | ".join([f"{any_byte:.0f}", *(f"{missed:.0f} ({part:.0%})" for missed, part in parts)])
            group = experts_of_a_group(experts, of.sizes, BLOCK_BYTES)
            chosen = "yes" if group > 1 and pays_in_groups(row.residents, row.slots) else "no"
            sizes = " + ".join(f"{size:g}" for size in mib)
            yield f"| {name} | {batch} | {sizes} | {experts} | {row.residents} | {row.slots} | {each} | {chosen} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", type=Path)
    print(
        f"# Residents by blocks and by groups\n\nMade by `benchmarks/{Path(__file__).name}`; its docstring says how. MiB that"
    )
    print("a decode step reads over PCIe, and the share of the experts in VRAM in part. The last column is what\nis served.\n")
    print(*table(parser.parse_args().traces), sep="\n")


if __name__ == "__main__":
    main()

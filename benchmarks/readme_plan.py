"""The README's sample plan: ``python benchmarks/readme_plan.py CONFIG.json`` prints what ``plan`` says of it on 8 H20."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.machine import preset
from sglang_uvm_offload.sizing.plan import Parallel, Plan, Reserve, Workload
from sglang_uvm_offload.sizing.planner import plan, render
from sglang_uvm_offload.sizing.slots import NO_SLOTS, Slots

PARTS = ("It fits", "predicted")
"""How the parts begin that the README shows."""
CONTEXT = 32768
"""Tokens of a request in every plan that a page shows."""


def sample(config: Path) -> str:
    """The outcome and the predicted speeds, as an indented block."""
    return shown(planned(config, "8xH20", requests=4))


def planned(
    config: Path,
    machine: str,
    requests: int = 1,
    slots: Slots = NO_SLOTS,
    speculative: bool = False,
    reserve: Reserve | None = None,
) -> Plan:
    """By the command's defaults: tensor parallelism over all GPUs."""
    where = preset(machine)
    work = Workload(CONTEXT, requests=requests, speculative=speculative)
    return plan(_model(config), where, work, Parallel(tp=where.gpus), reserve, slots=slots)


_model = cache(load)


def shown(result: Plan) -> str:
    """``PARTS`` of the rendered plan, as an indented block."""
    kept = [part for part in render(result).split("\n\n") if part.startswith(PARTS)]
    return "\n\n".join("\n".join(f"    {line}" for line in part.splitlines()) for part in kept)


if __name__ == "__main__":
    print(sample(Path(sys.argv[1])))

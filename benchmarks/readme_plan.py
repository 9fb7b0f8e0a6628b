"""The README's sample plan: ``python benchmarks/readme_plan.py CONFIG.json`` prints what ``plan`` says of it on 8 H20."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.machine import preset
from sglang_uvm_offload.sizing.plan import Parallel, Workload
from sglang_uvm_offload.sizing.planner import plan, render

PARTS = ("It fits", "predicted")
"""How the parts begin that the README shows."""


def sample(config: Path) -> str:
    """The outcome and the predicted speeds, as an indented block."""
    text = render(plan(load(config), preset("8xH20"), Workload(32768, requests=4), Parallel(tp=8)))
    shown = [part for part in text.split("\n\n") if part.startswith(PARTS)]
    return "\n\n".join("\n".join(f"    {line}" for line in part.splitlines()) for part in shown)


if __name__ == "__main__":
    print(sample(Path(sys.argv[1])))

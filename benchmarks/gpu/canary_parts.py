"""The part that queries the GPU as a launcher does before it starts its ranks."""

from __future__ import annotations

import time

from cuda.bindings import driver

from benchmarks.gpu.rows import Rows, run_part
from sglang_uvm_offload.cuda.canary import canary_problems
from sglang_uvm_offload.cuda.device import call_driver, free_vram, problems_of, start_driver, visible_gpus


def canary(rows: Rows) -> None:
    """Checks that a launcher's queries leave no context, which would hold VRAM for as long as its ranks serve."""
    problems = problems_of([0])
    began = time.perf_counter()
    problems += canary_problems((0,))
    rows.put("canary_seconds", "s", [time.perf_counter() - began])
    rows.put("canary_problems", "problems", [len(problems)])
    seen, free = visible_gpus(), free_vram([0])
    rows.put("launcher_sees", "GiB", [seen[0][1] / 2**30], of="all VRAM")
    rows.put("launcher_sees", "GiB", [free[0] / 2**30], of="free VRAM")
    contexts = int(has_context())
    rows.put("launcher_contexts", "contexts", [contexts])
    problems += [f"what a launcher asks left {contexts} context"] if contexts else []
    if problems:
        raise AssertionError("\n".join(problems))


def has_context() -> bool:
    """Whether this process has a context on the first GPU (``cuDevicePrimaryCtxGetState`` does not create one)."""
    start_driver()
    error, _, active = driver.cuDevicePrimaryCtxGetState(call_driver(driver.cuDeviceGet, 0))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise AssertionError(f"cuDevicePrimaryCtxGetState failed: {error.name}")
    return bool(active)


PARTS = {"canary": canary}

if __name__ == "__main__":
    run_part(PARTS)

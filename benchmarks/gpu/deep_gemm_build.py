"""Compiles the DeepGEMM kernels for ``runner_parts.py``: ``python3 -m benchmarks.gpu.deep_gemm_build``.

DeepGEMM compiles a kernel in the first step that needs it, and caches it by source, options and DeepGEMM's own folder. So
kernels from another machine, or compiled over the stand-in driver, are found if that folder has the same path.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.moe_deep_gemm import LAYOUTS, MaskedDeepGemm, SglangDeepGemm
from benchmarks.gpu.runner_parts import BATCHES, COPIED, FUNCTION, chosen, nowhere

TOKENS = sorted({*BATCHES, len(COPIED) // FUNCTION.top_k})
"""Tokens of the timed steps, and of the step that fills slots."""


def build() -> dict[str, float]:
    """Compiles the kernels. Returns seconds by layout."""
    sizes = SglangDeepGemm.sizes(FUNCTION).items()
    weights = {name: torch.zeros(FUNCTION.experts, *size, device="cuda").to(dtype) for name, (size, dtype) in sizes}
    seconds = {}
    for layout, function in zip(LAYOUTS, (SglangDeepGemm, MaskedDeepGemm), strict=True):
        began = time.monotonic()
        for tokens in TOKENS:
            step = function(FUNCTION, tokens, nowhere)
            step.route(chosen(COPIED, FUNCTION, tokens, 0))
            step.run(weights)
        seconds[layout] = time.monotonic() - began
    return seconds


if __name__ == "__main__":
    for layout, seconds in build().items():
        print(f"{layout}: {seconds:.0f} s")

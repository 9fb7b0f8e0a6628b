"""Compiles the DeepGEMM kernels of ``runner_parts.py``. As a program: ``python3 -m benchmarks.gpu.deep_gemm_build``.

DeepGEMM compiles a kernel at the first step that needs it, and keeps it by its source, its options and the folder of DeepGEMM
itself. So kernels from elsewhere, compiled over the stand-in driver too, are found where that folder has the same path.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.moe_deep_gemm import LAYOUTS, MaskedDeepGemm, SglangDeepGemm
from benchmarks.gpu.runner_parts import BATCHES, COPIED, FUNCTION, chosen, nowhere

TOKENS = sorted({*BATCHES, len(COPIED) // FUNCTION.top_k})
"""Of the steps that are timed, and of the one that fills slots."""


def build() -> dict[str, float]:
    """Seconds by layout."""
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

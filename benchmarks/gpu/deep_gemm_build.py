"""Compiles the DeepGEMM kernels of ``runner_parts.py``. As a program: ``python3 -m benchmarks.gpu.deep_gemm_build``.

DeepGEMM compiles a kernel at the first step that needs it, and keeps it by its source, its options and the folder of DeepGEMM
itself. So kernels from elsewhere, compiled over the stand-in driver too, are found where that folder has the same path.
"""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.runner_parts import BATCHES, COPIED, FUNCTION, chosen, nowhere
from benchmarks.gpu.shapes import FP8_BLOCK
from benchmarks.gpu.slot_deep_gemm import LAYOUTS, NAMES, MaskedDeepGemm, SglangDeepGemm
from benchmarks.gpu.slot_function import Tensors, matrices

TOKENS = sorted({*BATCHES, len(COPIED) // FUNCTION.top_k})
"""Of the steps that are timed, and of the one that fills slots."""


def build() -> dict[str, float]:
    """Seconds by layout."""
    weights, seconds = without_values(), {}
    for layout, function in zip(LAYOUTS, (SglangDeepGemm, MaskedDeepGemm), strict=True):
        began = time.monotonic()
        for tokens in TOKENS:
            step = function(FUNCTION, tokens, nowhere)
            step.route(chosen(COPIED, FUNCTION, tokens, 0))
            step.run(weights)
        seconds[layout] = time.monotonic() - began
    return seconds


def without_values() -> Tensors:
    made = {}
    for matrix, (n, k) in matrices(FUNCTION).items():
        weight = torch.zeros(FUNCTION.experts, n, k, dtype=torch.uint8, device="cuda")
        made[f"{matrix}_weight"] = weight.view(torch.float8_e4m3fn)
        made[f"{matrix}_scale"] = torch.ones(FUNCTION.experts, n // FP8_BLOCK, k // FP8_BLOCK, device="cuda")
    return {name: made[name] for name in NAMES}


if __name__ == "__main__":
    for layout, seconds in build().items():
        print(f"{layout}: {seconds:.0f} s")

"""Compiles SGLang's Marlin MoE kernels in parallel: ``python3 marlin_build.py``.

SGLang compiles each variant in the first call that needs it. Each takes minutes: longer than a part may run, and a killed
compiler leaves nothing. This program fills SGLang's own cache; a process that needs a variant meanwhile waits for it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import product
from typing import NamedTuple


class Variant(NamedTuple):
    """A variant of ``moe_wna16_marlin_gemm``, as ``fused_marlin_moe`` calls it without expert parallelism."""

    has_bias: bool
    """True for gpt-oss's MXFP4, with bfloat16 activations; False for GPTQ, with float16."""
    second_gemm: bool
    """The second GEMM zeroes the rows of inactive blocks."""

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.has_bias else "float16"

    def __str__(self) -> str:
        return f"GEMM {2 if self.second_gemm else 1} of experts {'with' if self.has_bias else 'without'} biases"


VARIANTS = [Variant(*each) for each in product((True, False), (False, True))]
ONE = """
import sys
import torch
from sglang.kernels.ops.moe.moe_wna16_marlin import _jit_moe_wna16_marlin_module as module
has_bias, second_gemm = (word == "True" for word in sys.argv[2:])
module(getattr(torch, sys.argv[1]), False, has_bias, True, second_gemm, True)
"""


def build() -> dict[Variant, float]:
    """Returns the seconds until each variant and those before it were compiled. Raises ``AssertionError`` after all have ended
    if one could not be compiled."""
    began = time.monotonic()
    started = {each: subprocess.Popen([sys.executable, "-c", ONE, each.dtype, *map(str, each)]) for each in VARIANTS}
    codes = {each: (process.wait(), time.monotonic() - began) for each, process in started.items()}
    if failed := [str(each) for each, (code, _) in codes.items() if code]:
        raise AssertionError(f"could not be compiled: {', '.join(failed)}")
    return {each: seconds for each, (_, seconds) in codes.items()}


if __name__ == "__main__":
    for each, seconds in build().items():
        print(f"{each}: {seconds:.0f} s")

"""How much VRAM is left for experts on the stand-in driver's GPU."""

import math
from pathlib import Path

from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.machine import GIB

VRAM = 16 * GIB
LAYERS, CONTEXT = 3, 2048
LAYER_TOKEN_BYTES = 2 * 2 * 64 * 2
"""Keys and values of two heads of 64, in two bytes."""


def fraction(folder: Path, residents: int, tokens: int, beside: int = 0, layers: int = LAYERS, measured: bool = False) -> float:
    """Returns the ``--mem-fraction-static`` that weights, ``residents`` experts per layer, a cache of ``tokens`` and ``beside``
    bytes fill exactly: as a plan assumes, or as a rank has ``measured``, where CUDA's context takes nothing and torch rounds up
    weights.

    Experts of 512 KiB and 256 KiB, in two tensors a layer: a block of 2 MiB holds 4 of one and 8 of the other."""
    shape = shape_of(folder)
    blocks = layers * (math.ceil(residents / 4) + math.ceil(residents / 8))
    cache = tokens * layers * LAYER_TOKEN_BYTES + CONTEXT * 4
    room = shape.total_bytes - shape.expert_bytes + cache + blocks * BLOCK_BYTES + (128 << 20) + beside
    if measured:
        return (room + 2 * BLOCK_BYTES) / VRAM
    return room / (VRAM - int(Assumptions().context_gib * GIB)) + 1e-6

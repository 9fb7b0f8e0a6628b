"""What a checkpoint's tensors become in the memory of a server that loads them in another dtype."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from sglang_uvm_offload.sizing.safetensors_header import DTYPES, FLOATS, TensorInfo

_KEPT = re.compile(r"scale|norm|router|\.gate\.|A_log|\.indexer\.|correction_bias")
"""Small ones that SGLang keeps in float32 in some models (scales, routers' weights, the states' decay): counted as they are."""


def as_loaded(tensors: Iterable[TensorInfo], dtype: str | None) -> list[TensorInfo]:
    """``tensors`` with weights in ``dtype``, by torch's name. Quantised ones stay as they are, and all of them do with None."""
    code = DTYPES.get(dtype or "")
    return [
        dataclasses.replace(tensor, dtype=code)
        if code and _follows(tensor)
        else tensor  # SGLang copies into parameters of its dtype
        for tensor in tensors
    ]


def _follows(tensor: TensorInfo) -> bool:
    return tensor.dtype in FLOATS and len(tensor.shape) >= 2 and _KEPT.search(tensor.name) is None

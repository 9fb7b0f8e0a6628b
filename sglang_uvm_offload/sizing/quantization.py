"""Which quantisation a checkpoint states, and where: in its config.json, or in ModelOpt's hf_quant_config.json.

As SGLang 0.5.23 finds it (``ModelConfig._parse_quant_hf_config``, ``_parse_modelopt_quant_config``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, read_json

BESIDE = "hf_quant_config.json"
UNQUANTIZED = "none"
UNSTATED = "not stated"
"""The quantisation of a checkpoint that has quantised tensors, and no file that names the method."""
_CONFIG = "config.json"
_STATED_BY = "stated_by"
"""The file that states a quantisation, kept in its object."""


def read_config(file: Path) -> dict[str, Any]:
    """The config.json ``file``, with the quantisation that ``hf_quant_config.json`` next to it states."""
    beside = file.with_name(BESIDE)
    return with_beside(read_json(file), read_json(beside) if os.path.lexists(beside) else None)


def with_beside(config: Mapping[str, Any], beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """``config`` with the quantisation that ``beside`` states, if it states none itself."""
    if beside is None or _stated(config) is not None:
        return dict(config)
    inner = beside.get("quantization", beside)
    if not isinstance(inner, dict):
        raise CheckpointError(f"{BESIDE}: its quantization is {inner!r:.80}, not an object")
    if not inner.get("quant_algo") and not inner.get("quant_method"):
        return dict(config)  # ModelOpt writes the file for a model that it left as it was, too
    return {**config, "quantization_config": {**inner, _STATED_BY: BESIDE}}


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``config`` states of its quantisation, with SGLang's name of the method as ``quant_method``; empty without one."""
    quant = _stated(config)
    if quant is None:
        return {}
    if not isinstance(quant, dict) or not _is_block(quant.get("weight_block_size")):
        raise CheckpointError(f"the config's quantization_config is malformed: {quant!r:.200}")
    if quant.get("quant_method") in (None, "modelopt"):
        return {**quant, "quant_method": _modelopt_method(quant)}
    return quant


def stated_by(config: Mapping[str, Any]) -> str:
    """The file that states the quantisation of ``config``, or its absence."""
    quant = _stated(config)
    return str(quant.get(_STATED_BY, _CONFIG)) if isinstance(quant, dict) else _CONFIG


def contradiction(flag: str | None, stated: str, by: str) -> str:
    """Why ``--quantization`` ``flag`` does not name the quantisation that the file ``by`` states; empty if it does."""
    if flag is None or stated in (flag, UNSTATED) or stated in _SAME.get(flag, ()):
        return ""
    if stated == UNQUANTIZED:
        return (
            f"--quantization {flag}: nothing states that the checkpoint is quantised, nor which of its modules: give its "
            f"folder, or put its {BESIDE} next to {_CONFIG}; without the flag, "
            f"the plan is for the checkpoint as {_CONFIG} describes it"
        )
    return f"--quantization {flag}: the checkpoint is {stated} by {by}; leave out the flag"


_SAME = {
    "modelopt": ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
    "petit_nvfp4": ("modelopt_fp4",),
    "awq_marlin": ("awq",),
    "gptq_marlin": ("gptq",),
    "moe_wna16": ("awq", "gptq"),
    **dict.fromkeys(("compressed_tensors", "w8a8_int8", "w8a8_fp8"), ("compressed-tensors",)),
}
"""Names of flags for kernels that read these checkpoints as they are (``override_quantization_method``)."""


def _stated(config: Mapping[str, Any]) -> Any:
    found = config.get("quantization_config")
    return config.get("compression_config") if found is None else found


def _is_block(block: Any) -> bool:
    if block is None:
        return True
    whole = isinstance(block, list) and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block)
    return whole and len(block) == 2


def _modelopt_method(quant: Mapping[str, Any]) -> str:
    algorithm = str(quant.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION":
        layers = quant.get("quantized_layers")
        kinds = (
            [layer.get("quant_algo") for layer in layers.values() if isinstance(layer, dict)]
            if isinstance(layers, dict)
            else []
        )
        return "modelopt_mixed" if {"NVFP4", "W4A16_NVFP4"}.intersection(kinds) else "w4afp8"
    if "FP4" in algorithm:
        return "modelopt_fp4"
    known = {"FP8": "modelopt_fp8", "MXFP8": "mxfp8"}
    return known.get(algorithm, f"modelopt {algorithm}".strip())

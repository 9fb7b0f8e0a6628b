"""Warns if SGLang's Triton kernel would read offloaded experts in pieces too short for PCIe.

The kernel reads a weight row ``BLOCK_SIZE_K`` elements at a time, as set by SGLang's configuration for the experts' shape and
this GPU. Reads of host memory under ``LINE_BYTES`` waste the link. This module changes nothing: another ``BLOCK_SIZE_K``
accumulates in another order, so the output's last bits differ.

The shape comes from the model's config. There is no warning for models and quantisations that this module does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import (
    get_config_dtype_str,
    get_config_file_name,
    get_default_config,
    get_moe_configs,
)
from sglang.srt.layers.moe.utils import resolve_shared_experts_config
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.runtime_context import create_context, moe_tp_size_of, use_context

from sglang_uvm_offload.config import NEVER
from sglang_uvm_offload.plugin.compat import model_config_of, resolving_view
from sglang_uvm_offload.plugin.launch.routing_formats import routing_format
from sglang_uvm_offload.plugin.server_config import config_of
from sglang_uvm_offload.sizing.moe_shape import moe_shape

LINE_BYTES = 128
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The tokens of a step that SGLang's tuning script tries; its default rule is judged at these."""


@dataclass(frozen=True)
class Experts:
    """The experts of a layer on one rank, as SGLang's Triton runner gets them. SGLang chooses its configuration by these."""

    num_experts: int
    """Routed, redundant and fused shared ones."""
    width: int
    """Elements of a row of the down projection, as stored: two 4-bit weights are one element."""
    hidden: int
    top_k: int
    dtype: str | None
    """SGLang's name for the kernel's input types."""
    bits: int
    """Bits of a weight."""
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False


def warnings(server_args: Any) -> list[str]:
    """The warnings for a launch with the resolved ``server_args``, on a machine with its GPU."""
    config = config_of(server_args)
    in_place = NEVER if config is None or config.stream_tokens is None else config.stream_tokens
    with use_context(create_context(server_args, role="scheduler")):
        experts = launched_experts(server_args)
        return [] if experts is None else narrow_tiles(experts, in_place)


def narrow_tiles(experts: Experts, in_place: int = NEVER) -> list[str]:
    """One line for each configuration whose tiles are too narrow at some number of tokens below ``in_place``, at which steps
    begin to stream. Needs SGLang's context."""
    lines: list[str] = []
    for source, blocks in _configurations(experts):
        read = {rows: block for rows, block in blocks.items() if rows < in_place}
        lines += filter(None, [_warning(source, read, experts.bits)])
    return lines


def _configurations(experts: Experts) -> Iterator[tuple[str, dict[int, int]]]:
    """The files, or the rule, by which SGLang configures the two GEMMs, each with ``BLOCK_SIZE_K`` by tokens."""
    block = experts.block_shape or (0, 0)
    key = (experts.num_experts, experts.width, experts.dtype)
    up, down = (
        get_moe_configs(*key, *block, per_channel_quant=experts.per_channel, down_moe=second) for second in (False, True)
    )
    if up is None:
        given = (experts.num_experts, experts.width, experts.hidden, experts.top_k, experts.dtype, False)
        rule = {rows: get_default_config(rows, *given, list(block) if experts.block_shape else None) for rows in ROWS}
        yield f"SGLang's default rule, as there is no {_file(experts, False)}", _blocks(rule)
    else:
        yield _file(experts, False), _blocks(up)
    if down is not None and down != up:  # without its own file, the second GEMM uses the first one's
        yield _file(experts, True), _blocks(down)


def _file(experts: Experts, down: bool) -> str:
    block: Any = list(experts.block_shape or (0, 0))
    return get_config_file_name(experts.num_experts, experts.width, experts.dtype, block, experts.per_channel, down_moe=down)


def _blocks(configuration: dict[int, Any]) -> dict[int, int]:
    return {rows: int(tile["BLOCK_SIZE_K"]) for rows, tile in sorted(configuration.items())}


def _warning(source: str, blocks: dict[int, int], bits: int) -> str | None:
    narrow = {rows: block * bits // 8 for rows, block in blocks.items() if block * bits // 8 < LINE_BYTES}
    if not narrow:
        return None
    sizes = "; ".join(
        f"{size} bytes at {', '.join(str(rows) for rows in narrow if narrow[rows] == size)} tokens a step"
        for size in sorted(set(narrow.values()))
    )
    return (
        f"SGLang's Triton MoE kernel would read offloaded experts in pieces under {LINE_BYTES} bytes, which wastes PCIe: "
        f"{sizes} (BLOCK_SIZE_K of {source}). To change it, tune the kernel for this GPU with SGLang's "
        f"benchmark/kernels/fused_moe_triton, keep a BLOCK_SIZE_K of {LINE_BYTES * 8 // bits} or more, and name the folder by "
        "SGLANG_MOE_CONFIG_DIR; outputs may then differ in the last bits"
    )


def launched_experts(server_args: Any) -> Experts | None:
    """The experts that the launch gives to SGLang's Triton runner; None if another runner computes them, or if this module does
    not know the format. Needs SGLang's context."""
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    runner = routing_format(cfg, model, server_args.moe_runner_backend).runner
    text = model.hf_text_config
    shape = moe_shape(text)
    size = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", None)
    if cfg.device != "cuda" or cfg.moe_a2a_backend != "none" or runner not in ("auto", "triton"):
        return None
    if shape is None or shape.top_k is None or not isinstance(size, int) or model.is_fp4_experts:
        return None
    model_class, _ = get_model_architecture(model)
    quantization = get_quant_config(model, LoadConfig(), {}) if model.quantization else None
    weights = _weights(model.dtype, quantization)
    if weights is None:
        return None
    shared = resolve_shared_experts_config(model_class, model.hf_config, quantization).num_fused_shared_experts
    width = size // moe_tp_size_of(cfg)
    return Experts(
        num_experts=(shape.num_experts + cfg.ep_num_redundant_experts) // cfg.ep_size + shared,
        width=width // 2 if weights["bits"] == 4 else width,
        hidden=text.hidden_size,
        top_k=shape.top_k + shared,
        **weights,
    )


def _weights(dtype: Any, quantization: Any) -> dict[str, Any] | None:
    """How ``quantization`` (SGLang's config of it, or None) passes weights to the Triton runner; None if unknown here."""
    block = getattr(quantization, "weight_block_size", None)
    blocks = {"block_shape": tuple(block) if block else None}
    match quantization.get_name() if quantization is not None else None:
        case None:
            return {"dtype": get_config_dtype_str(dtype), "bits": 8 * dtype.itemsize}
        case "fp8":
            return {"dtype": "fp8_w8a8", "bits": 8, **blocks}
        case "modelopt_fp8":
            return {"dtype": "fp8_w8a8", "bits": 8}
        case "w8a8_fp8":
            return {"dtype": "fp8_w8a8", "bits": 8, "per_channel": True}
        case "w8a8_int8":
            return {"dtype": "int8_w8a8", "bits": 8, "per_channel": True}
        case "blockwise_int8":
            return {"dtype": "int8_w8a8", "bits": 8, **blocks}
        case "moe_wna16":
            bits = quantization.weight_bits
            return {"dtype": f"int{bits}_w{bits}a16", "bits": bits, "block_shape": (0, quantization.group_size)}
        case "compressed_tensors":
            return _compressed([scheme.get("weights") for scheme in quantization.target_scheme_map.values()])
    return None


def _compressed(schemes: list[Any]) -> dict[str, Any] | None:
    """FP8 weights only: integers go to Marlin."""
    if not schemes or any(scheme != schemes[0] for scheme in schemes) or schemes[0] is None:
        return None
    weights = schemes[0]
    if weights.num_bits != 8 or weights.type != "float":
        return None
    block = weights.block_structure
    return {
        "dtype": "fp8_w8a8",
        "bits": 8,
        "block_shape": tuple(block) if block else None,
        "per_channel": weights.strategy == "channel",
    }

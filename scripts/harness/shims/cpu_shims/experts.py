"""Expert kernels in plain torch, where SGLang has only Triton ones or none for a CPU.

What SGLang does by Triton kernels goes through its ``_prepare_fused_moe_run``, and each block of tokens is computed with the
row that its list names, which may lie behind those of the experts. SGLang has a kernel of its own for unquantised experts on a
CPU; with ``SHIM_EXPERTS=triton`` in the environment, they go the same way as others.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from cpu_shims.hooks import around, instead, on_cpu

TRITON = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
UNSET = 2**30
"""What SGLang leaves uninitialised, as no row of anything."""


def install() -> None:
    around("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", native_experts)
    around(f"{TRITON}.inplace_fused_experts", inplace_experts)
    around(f"{TRITON}.outplace_fused_experts", outplace_experts)
    instead(f"{TRITON}.moe_align_block_size", align)
    around(f"{TRITON}_triton_config.get_device_name", on_cpu)


def native_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    if os.environ.get("SHIM_EXPERTS") != "triton":
        return skip_absent_experts(original, layer, x, topk_output, config)
    biases = {name: getattr(layer, f"{weight}_bias", None) for name, weight in (("b1", "w13_weight"), ("b2", "w2_weight"))}
    config = dataclasses.replace(config, inplace=False)
    fused_moe = importlib.import_module(TRITON)
    return fused_moe.fused_experts(x, layer.w13_weight, layer.w2_weight, topk_output, config, **biases)


def align(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The places in ``topk_ids`` by expert, -1 first, each expert's padded to whole blocks; each block's expert; and the number
    of places with the padding."""
    flat = topk_ids.flatten()
    places = flat.numel()
    room = places * block_size if places < num_experts + 1 else places + (num_experts + 1) * (block_size - 1)
    room = (room + 3) // 4 * 4
    order = torch.full((room,), places, dtype=torch.int32)
    blocks = torch.full((-(-room // block_size),), UNSET, dtype=torch.int32)
    used = 0
    for expert in flat.unique().tolist():
        mine = (flat == expert).nonzero().flatten()
        count = -(-mine.numel() // block_size)
        blocks[used : used + count] = expert
        order[used * block_size : used * block_size + mine.numel()] = mine
        used += count
    return order, blocks, torch.tensor([used * block_size], dtype=torch.int32)


class WithoutThem:
    """The experts' weights, followed by as many all-zero experts as are asked for, without a copy of the weights."""

    def __init__(self, weights: torch.Tensor):
        self.weights = weights
        self.zero = torch.zeros_like(weights[0])

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.weights[expert] if expert < self.weights.shape[0] else self.zero


def skip_absent_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """The native kernel computes every id of a token; under expert parallelism some are -1: another rank's, or padding.

    Send those to experts of zeros behind the layer's own, each of a token's to a different one as the kernel expects.
    """
    ids = topk_output.topk_ids
    local = layer.w13_weight.shape[0]
    absent = ids < 0
    if local == layer.num_experts and not absent.any():
        return original(layer, x, topk_output, config)
    spare = local + torch.arange(ids.shape[1], dtype=ids.dtype).expand_as(ids)
    names = ("w13_weight", "w2_weight", "w13_weight_bias", "w2_weight_bias")
    present = {name: getattr(layer, name) for name in names if getattr(layer, name, None) is not None}
    padded = SimpleNamespace(
        num_experts=local + ids.shape[1], **{name: WithoutThem(tensor) for name, tensor in present.items()}
    )
    topk_output = topk_output._replace(
        topk_ids=torch.where(absent, spare, ids), topk_weights=topk_output.topk_weights.masked_fill(absent, 0)
    )
    return original(padded, x, topk_output, config)


def inplace_experts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    given = _named(original, args, kwargs)
    given["hidden_states"].copy_(reference_experts(**given))


def outplace_experts(original: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
    return reference_experts(**_named(original, args, kwargs))


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a custom operator of SGLang's, which in some versions shows its parameters in its schema only."""
    schema = getattr(torch.ops.sglang, op.__name__).default._schema
    return dict(zip([parameter.name for parameter in schema.arguments], args, strict=False)) | kwargs


def reference_experts(
    *,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    activation: str = "silu",
    is_gated: bool = True,
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    routed_scaling_factor: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_limit: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """What the fused Triton kernels compute, expert by expert on dequantised weights."""
    assert activation == "silu"
    assert is_gated
    assert not apply_router_weight_on_input
    fused_moe, x = importlib.import_module(TRITON), hidden_states
    config, *_, order, blocks, padded = fused_moe._prepare_fused_moe_run(
        x,
        w1,
        w2,
        topk_ids,
        use_fp8_w8a8=use_fp8_w8a8,
        use_int8_w8a8=use_int8_w8a8,
        use_int8_w8a16=use_int8_w8a16,
        use_int4_w4a16=use_int4_w4a16,
        per_channel_quant=per_channel_quant,
        block_shape=block_shape,
    )
    scaled_by = None if use_int4_w4a16 else block_shape
    output = torch.zeros(x.shape, dtype=torch.float32)
    for row, places in by_row(order, blocks, int(padded), config["BLOCK_SIZE_M"], topk_ids.numel()):
        token, choice = places // topk_ids.shape[1], places % topk_ids.shape[1]
        both = linear(x[token], dequantised(w1, w1_scale, w1_zp, row, scaled_by), b1, row)
        if gemm1_alpha is None:
            gate, up = both.chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate) * up
        else:
            hidden = fused_moe.swiglu_gpt_oss_sigmoid_alpha(both, gemm1_alpha, gemm1_limit)
        out = linear(hidden.to(x.dtype), dequantised(w2, w2_scale, w2_zp, row, scaled_by), b2, row)
        output.index_add_(0, token, out * topk_weights[token, choice].float().unsqueeze(1))
    return (output * (routed_scaling_factor or 1.0)).to(x.dtype)


def by_row(
    order: torch.Tensor, blocks: torch.Tensor, padded: int, block_size: int, num_places: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each row that some block is computed with, and the places that are: an expert's blocks are neighbours."""
    used = blocks[: padded // block_size]
    placed = order[:padded].view(-1, block_size)
    for row in used[used >= 0].unique_consecutive().tolist():
        places = placed[used == row].flatten()
        yield row, places[places < num_places].long()


def row_of(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """``tensor[row]``, or as the kernels compute it, what lies there behind the tensor."""
    if row < tensor.shape[0]:
        return tensor[row]
    steps = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    elements = row * tensor.stride(0) + sum((size - 1) * stride for size, stride in steps) + 1
    memory = (ctypes.c_uint8 * (elements * tensor.element_size())).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape[1:], tensor.stride()[1:], row * tensor.stride(0))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, row: int) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), weight, None if bias is None else row_of(bias, row).float())


def dequantised(
    weights: torch.Tensor, scales: torch.Tensor | None, zeros: torch.Tensor | None, row: int, block: list[int] | None
) -> torch.Tensor:
    """One row's [out, in] weight in float32."""
    weight = row_of(weights, row)
    if scales is None:
        return weight.float()
    scale = row_of(scales, row).float()
    if weight.dtype == torch.uint8:
        return dequantised_int4(weight, scale, None if zeros is None else row_of(zeros, row))
    if block is not None:
        scale = scale.repeat_interleave(block[0], 0)[: weight.shape[0]].repeat_interleave(block[1], 1)
        return weight.float() * scale[:, : weight.shape[1]]
    return weight.float() * scale.reshape(-1, 1)


def dequantised_int4(packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """Two neighbouring inputs a byte, the first in the low bits; zeros likewise along the outputs, or 8 throughout."""
    values = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).float()
    zero = torch.full_like(scale, 8.0)
    if zeros is not None:
        zero = torch.stack([zeros & 0xF, zeros >> 4], dim=1).flatten(0, 1).float()
    group = values.shape[1] // scale.shape[1]
    return (values - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)

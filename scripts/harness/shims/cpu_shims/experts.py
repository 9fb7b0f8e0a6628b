"""Expert kernels in plain PyTorch, where SGLang has only Triton kernels or none for a CPU.

In place of the Triton kernels, these call SGLang's ``_prepare_fused_moe_run`` and compute each block of tokens with the weight
row that its list names, which may lie behind the rows of the experts. SGLang's own CPU kernel computes unquantised experts;
``SHIM_EXPERTS=triton`` in the environment has these kernels compute them too.
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
"""A row that does not exist, where SGLang's kernel leaves memory uninitialised."""


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
    """Sort the positions in ``topk_ids`` by expert, -1 first, and pad each expert's to whole blocks. Returns the positions, the
    expert of each block, and the number of positions with padding."""
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
    """The experts' weights, followed by any number of all-zero experts, without a copy of the weights."""

    def __init__(self, weights: torch.Tensor):
        self.weights = weights
        self.zero = torch.zeros_like(weights[0])

    def __getitem__(self, expert: int) -> torch.Tensor:
        return self.weights[expert] if expert < self.weights.shape[0] else self.zero


def skip_absent_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, config: Any
) -> torch.Tensor:
    """Replace ids of -1, which expert parallelism uses for other ranks' experts and for padding: the native kernel computes
    every id. Each becomes an all-zero expert behind the layer's own; those of one token differ, as the kernel expects."""
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
    """The arguments of an SGLang custom operator by name. In some versions only its schema has the names."""
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
    """Compute the result of the fused Triton kernels expert by expert, from dequantised weights."""
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
    """Each weight row that a block uses, with the positions computed from it. The blocks of a row are adjacent."""
    used = blocks[: padded // block_size]
    placed = order[:padded].view(-1, block_size)
    for row in used[used >= 0].unique_consecutive().tolist():
        places = placed[used == row].flatten()
        yield row, places[places < num_places].long()


def row_of(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """``tensor[row]``; beyond the end of the tensor, the memory at that stride, as the kernels address it."""
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
    """The float32 ``[out, in]`` weight of one row."""
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
    """Unpack two adjacent inputs per byte, the first in the low bits. Zero points are packed alike along the outputs; without
    any, all are 8."""
    values = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).float()
    zero = torch.full_like(scale, 8.0)
    if zeros is not None:
        zero = torch.stack([zeros & 0xF, zeros >> 4], dim=1).flatten(0, 1).float()
    group = values.shape[1] // scale.shape[1]
    return (values - zero.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)

"""Runs SGLang's code around its Marlin kernels on a CPU. A reference in torch replaces the kernels and indexes as they do."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.moe import moe_align_single_token, moe_topk_sum
from sglang.kernels.ops.quantization import awq_marlin_repack
from sglang.srt.layers.moe import fused_moe_triton
from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe
from sglang.srt.layers.quantization import marlin_utils, marlin_utils_fp4

FUSED = fused_marlin_moe.fused_marlin_moe.__wrapped__
"""SGLang's plain function, because its registered operator has no CPU implementation."""
TOP_K = 2


def ids_of(tokens: int, experts: tuple[int, ...] = (1, 2, 3), dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """``[tokens, TOP_K]``: different ones of ``experts`` for each token, the same on each call."""
    random = torch.Generator().manual_seed(tokens)
    picks = torch.tensor(experts)
    return torch.stack([picks[torch.randperm(len(picks), generator=random)[:TOP_K]] for _ in range(tokens)]).to(dtype)


def on_cpu(patch: pytest.MonkeyPatch, gemm: Callable[..., torch.Tensor], fused: Callable[..., torch.Tensor] = FUSED) -> None:
    """Makes SGLang call ``gemm`` for its kernel and ``fused`` for ``fused_marlin_moe``, and replaces its other GPU queries."""
    for name, function in (
        ("moe_wna16_marlin_gemm", gemm),
        ("fused_marlin_moe", fused),
        ("silu_and_mul", lambda x, out: out.copy_(torch.nn.functional.silu(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :])),
        ("moe_sum_reduce", lambda x, out, factor: out.copy_(x.float().sum(1) * factor)),
        ("get_scalar_type", lambda num_bits, *_: SimpleNamespace(bits=num_bits)),
    ):
        patch.setattr(fused_marlin_moe, name, function, raising=False)
    patch.setattr(moe_topk_sum, "moe_topk_sum", lambda x, out: out.copy_(x.float().sum(1)))
    patch.setattr(fused_moe_triton, "moe_align_block_size", align)
    patch.setattr(moe_align_single_token, "moe_align_single_token", align_single_token)
    patch.setattr("sglang.srt.hardware_backend.gpu.quantization.gptq_kernels.gptq_marlin_repack", repack)
    patch.setattr(marlin_utils_fp4, "gptq_marlin_repack", repack, raising=False)
    patch.setattr(awq_marlin_repack, "awq_marlin_repack", lambda weight, *shape: repack(weight, None, *shape))
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=2))
    for module in (torch.cuda, marlin_utils):
        patch.setattr(module, "get_device_capability", lambda *_: (9, 0))


def repack(b_q_weight: torch.Tensor, perm: Any, size_k: int, size_n: int, num_bits: int) -> torch.Tensor:
    """Returns a tensor as large as SGLang's repacked weight."""
    return b_q_weight.reshape(size_k // 16, size_n * (num_bits // 2)).clone()


def align(
    ids: torch.Tensor, block_size: int, num_experts: int, return_inactive_prefix_count: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Acts as SGLang's ``moe_align_block_size`` on a GPU: experts ascend from -1, and the tails of the lists are garbage."""
    assert int(ids.max()) < num_experts
    room = min(ids.numel(), num_experts + 1) * (block_size - 1) + ids.numel()
    order = torch.full(((room + 3) // 4 * 4,), 2**30, dtype=torch.int32)
    blocks = torch.full((-(-len(order) // block_size),), 2**30, dtype=torch.int32)
    at, inactive = 0, 0
    for expert in range(-1, num_experts):
        routes = (ids.flatten() == expert).nonzero().flatten().int()
        count = -(-len(routes) // block_size)
        order[at * block_size : (at + count) * block_size] = ids.numel()
        order[at * block_size : at * block_size + len(routes)] = routes
        blocks[at : at + count] = expert
        at += count
        inactive += count * (expert == -1)
    counts = [at * block_size, inactive] if return_inactive_prefix_count else [at * block_size]
    return order, blocks, torch.tensor(counts, dtype=torch.int32)


def align_single_token(
    ids: torch.Tensor, block_size: int, *, return_inactive_prefix_count: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ``align``, but the lists have no tails."""
    order, blocks, counts = align(ids, block_size, int(ids.max()) + 1, return_inactive_prefix_count)
    return order[: ids.numel() * block_size], blocks[: ids.numel()], counts


def row(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Returns what a kernel reads at base + index * stride, regardless of the tensor's size."""
    assert tensor.is_contiguous()
    nbytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    there = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr() + index * nbytes)
    return torch.frombuffer(there, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape[1:])


def poison(tensor: torch.Tensor) -> None:
    """Fills a contiguous ``tensor`` with bytes that are NaN in each floating-point type."""
    tensor.reshape(-1).view(torch.uint8).fill_(0xFF)


def assert_each_is_computed_with(weights: Mapping[str, torch.Tensor], output: Callable[[], torch.Tensor]) -> None:
    """Asserts that the output depends on expert 1's rows of each tensor, which tokens chose, and not on expert 3's."""
    expected = output()
    assert expected.isfinite().all()
    assert expected.abs().max() > 0
    for name, tensor in weights.items():
        kept = tensor.clone()
        poison(tensor[1])
        assert not torch.equal(output(), expected), name
        tensor.copy_(kept)
        poison(tensor[3])
        assert torch.equal(output(), expected), "no token chose this expert"
        tensor.copy_(kept)


def unpacked(words: torch.Tensor, bits: int, *shape: int) -> torch.Tensor:
    values = words.contiguous().view(torch.uint8).flatten()
    return (values if bits == 8 else torch.stack([values & 15, values >> 4], -1)).reshape(shape).float()


def scale(values: torch.Tensor) -> torch.Tensor:
    """Converts scales. 8-bit ones have SGLang's own formats, with exponents that only its kernels' arithmetic supports."""
    return values.float() if values.element_size() > 1 else values.view(torch.uint8) / 255


def gemm(
    a: torch.Tensor,
    c: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    scales: torch.Tensor,
    global_scale: torch.Tensor | None,
    zeros: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    perm: torch.Tensor | None,
    workspace: torch.Tensor,
    order: torch.Tensor,
    blocks: torch.Tensor,
    padded: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    moe_block_size: int,
    top_k: int,
    mul_topk_weights: bool,
    is_ep: bool,
    b_q_type: Any,
    size_m: int,
    size_n: int,
    size_k: int,
    is_k_full: bool,
    expert_ids_are_sorted: bool,
    has_inactive_prefix_count: bool,
    zero_inactive_output: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Acts as ``moe_wna16_marlin_gemm``: finds rows, and inactive blocks, by the list of blocks as SGLang's
    ``marlin_template.h`` does. Values within an expert have neither Marlin's order nor its scaling."""
    used = int(padded[0]) // moe_block_size
    if has_inactive_prefix_count:
        assert len(padded) == 2
        skipped = range(int(padded[1]))
    elif expert_ids_are_sorted and not is_ep:
        skipped = range(int((blocks[:used] < 0).sum()))
    else:
        skipped = [i for i in range(used) if blocks[i] == -1]
    for block in range(used):
        routes = order[block * moe_block_size : (block + 1) * moe_block_size].long()
        routes = routes[routes < size_m * top_k]
        if block in skipped:
            if zero_inactive_output:
                c[routes] = 0
            continue
        at = int(blocks[block])
        bits, x = b_q_type.bits, a[routes // top_k].float()
        weight = unpacked(row(b, at), bits, size_k, size_n) - 2 ** (bits - 1)
        groups = scales.shape[1]
        group_of = torch.arange(size_k) * groups // size_k
        if zeros is not None and zeros.numel():
            weight = weight - unpacked(row(zeros, at), bits, groups, size_n)[group_of]
        if g_idx is not None and g_idx.numel() and perm is not None and perm.numel():
            x = x[:, row(perm, at).long()]
            group_of = group_of if is_k_full else row(g_idx, at).long()
        out = x @ (weight * scale(row(scales, at))[group_of] / 2**bits)
        if global_scale is not None:
            out = out * row(global_scale, at).float().frexp().mantissa
        if bias is not None:
            out = out + row(bias, at).float()
        c[routes] = (out * topk_weights.flatten()[routes, None] if mul_topk_weights else out).to(c.dtype)
    return c

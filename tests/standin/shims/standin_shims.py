"""Test-only: lets SGLang run over the stand-in CUDA, where kernels compute nothing.

A plugin of SGLang's own kind, found because this folder is on PYTHONPATH.
"""

from __future__ import annotations

import os


def install() -> None:
    import sgl_kernel.elementwise

    # FlashInfer's norms are CuTe DSL kernels, whose library has a CUDA runtime of its own inside, which talks to the driver
    # through private tables (cuGetExportTable). SGLang's own norm kernels call the runtime that is replaced.
    sgl_kernel.elementwise._has_flashinfer = False
    if first := os.environ.get("STANDIN_FIRST_EXPERT"):
        route_to(int(first))
        align_to(int(first))


def route_to(first: int) -> None:
    """Every token picks the experts from ``first`` on: the router's kernels leave nothing in ``topk_ids``."""
    import torch
    from sglang.srt.layers.moe.topk import TopK

    picks: dict[tuple[int, ...], torch.Tensor] = {}
    chosen = TopK.forward_cuda

    def forward_cuda(self: TopK, *arguments: object, **options: object) -> object:
        output = chosen(self, *arguments, **options)
        ids = output.topk_ids
        if tuple(ids.shape) not in picks:
            row = torch.arange(first, first + ids.size(1), dtype=ids.dtype)
            picks[tuple(ids.shape)] = row.expand(ids.shape).contiguous().pin_memory()
        ids.copy_(picks[tuple(ids.shape)], non_blocking=True)  # captured: a graph copies it anew at each replay
        return output

    TopK.forward_cuda = forward_cuda


def align_to(first: int) -> None:
    """One block for each expert of ``route_to``: the kernel that lists them leaves nothing either."""
    import torch
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    lists: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    made = fused_moe.moe_align_block_size

    def moe_align_block_size(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, ...]:
        order, blocks, padded = made(topk_ids, block_size, num_experts)
        top_k = topk_ids.size(1)
        if (top_k, block_size) not in lists:
            named = torch.arange(first, first + top_k, dtype=torch.int32).pin_memory()
            lists[top_k, block_size] = (named, torch.tensor([top_k * block_size], dtype=torch.int32).pin_memory())
        named, rows = lists[top_k, block_size]
        blocks[:top_k].copy_(named, non_blocking=True)
        padded.copy_(rows, non_blocking=True)
        return order, blocks, padded

    fused_moe.moe_align_block_size = moe_align_block_size

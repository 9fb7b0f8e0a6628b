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

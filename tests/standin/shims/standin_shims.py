"""Test-only: lets SGLang run over the stand-in CUDA, where kernels compute nothing.

A plugin of SGLang's own kind, found because this folder is on PYTHONPATH.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

TOKEN = 65
"""What every step generates."""
LONG = 64
"""Tokens of a step, above which it may pick other experts."""


def install() -> None:
    import sgl_kernel.elementwise

    # FlashInfer's norms are CuTe DSL kernels, whose library has a CUDA runtime of its own inside, which talks to the driver
    # through private tables (cuGetExportTable). SGLang's own norm kernels call the runtime that is replaced.
    sgl_kernel.elementwise._has_flashinfer = False
    ask_torch_what_captures()
    if given := os.environ.get("STANDIN_FIRST_EXPERT"):
        first, *of_long = map(int, given.split(","))
        route_to(first, *of_long)
        align_to(first, *of_long)
        gather_by_nccl()
        keep_the_first()
        sample_one_token()
        plan_on_the_host()
        add_up_on_the_host()


def ask_torch_what_captures() -> None:
    """Where a second stream joins a breakable graph, SGLang asks a CUDA runtime of cuda-python's own."""
    import torch
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as graphs

    def is_capturing(stream: torch.cuda.Stream) -> bool:
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    graphs._is_stream_capturing = is_capturing


def gather_by_nccl() -> None:
    """As between GPUs that cannot store to each other: no stand-in maps another's memory, and its rank would wait for that."""
    from sglang.srt.distributed.device_communicators.triton_symm_mem_ag import MultimemAllGatherer

    MultimemAllGatherer._build = lambda self, logits: None


def plan_on_the_host() -> None:
    """What SGLang's paged experts decide by: whether weights were changed, which experts a step needs, and which it holds. No
    kernel moves any, so these are those that its host moved last."""
    import torch

    equal, unique = torch.equal, torch.unique
    torch.equal = lambda one, other: equal(one.cpu(), other.cpu())
    torch.unique = lambda these: unique(these.cpu()).to(these.device)
    if find_spec("sglang.srt.layers.moe.paged_experts"):
        from sglang.srt.layers.moe.paged_experts.residency import DeviceResidency

        DeviceResidency.load_into = lambda self, policy: None


def add_up_on_the_host() -> None:
    """The rows of LongCat's n-gram tables, which kernels add up; its own kernels get them where they look."""
    from sglang.srt.layers.n_gram_embedding import NgramEmbedding

    from scripts.harness.shims.cpu_shims.hooks import OnCpu

    build, begin = NgramEmbedding.__init__, NgramEmbedding.init_buffers

    def build_on_host(self: NgramEmbedding, *arguments: Any, **options: Any) -> None:
        with OnCpu():
            build(self, *arguments, **options)

    def begin_on_gpu(self: NgramEmbedding, *arguments: Any, **options: Any) -> None:
        self.exclusive_oe_embedder_size_sums = self.exclusive_oe_embedder_size_sums.to("cuda")
        begin(self, *arguments, **options)

    NgramEmbedding.__init__, NgramEmbedding.init_buffers = build_on_host, begin_on_gpu


def route_to(first: int, of_long: int | None = None) -> None:
    """Every token picks the experts from ``first`` on, or ``of_long`` in a long step: the router's kernels leave nothing in
    ``topk_ids``."""
    import torch
    from sglang.srt.layers.moe.topk import TopK

    picks: dict[tuple[int, ...], torch.Tensor] = {}
    chosen = TopK.forward_cuda

    def forward_cuda(self: TopK, *arguments: object, **options: object) -> object:
        output = chosen(self, *arguments, **options)
        ids = output.topk_ids
        if tuple(ids.shape) not in picks:
            start = start_of(ids, first, of_long)
            row = torch.arange(start, start + ids.size(1), dtype=ids.dtype)
            picks[tuple(ids.shape)] = row.expand(ids.shape).contiguous().pin_memory()
        ids.copy_(picks[tuple(ids.shape)], non_blocking=True)  # captured: a graph copies it anew at each replay
        return output

    TopK.forward_cuda = forward_cuda


def start_of(ids: Any, first: int, of_long: int | None) -> int:
    return first if of_long is None or ids.size(0) <= LONG else of_long


def align_to(first: int, of_long: int | None = None) -> None:
    """One block for each expert of ``route_to``: the kernel that lists them leaves nothing either."""
    import torch
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    lists: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    made = fused_moe.moe_align_block_size

    def moe_align_block_size(topk_ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, ...]:
        order, blocks, padded = made(topk_ids, block_size, num_experts)
        top_k, start = topk_ids.size(1), start_of(topk_ids, first, of_long)
        if (start, top_k, block_size) not in lists:
            named = torch.arange(start, start + top_k, dtype=torch.int32).pin_memory()
            lists[start, top_k, block_size] = (named, torch.tensor([top_k * block_size], dtype=torch.int32).pin_memory())
        named, rows = lists[start, top_k, block_size]
        blocks[:top_k].copy_(named, non_blocking=True)
        padded.copy_(rows, non_blocking=True)
        return order, blocks, padded

    fused_moe.moe_align_block_size = moe_align_block_size


def keep_the_first() -> None:
    """Keep the first token of each drafted tree whose check leaves nothing."""
    import torch
    from sglang.srt.speculative import eagle_utils

    def eagle_sample(verify_input: Any, batch: Any, *arguments: object, **options: object) -> tuple[torch.Tensor, ...]:
        def there(rows: list[Any]) -> torch.Tensor:
            return torch.tensor(rows, dtype=torch.int32).to(batch.device)

        width, requests = verify_input.draft_token_num, range(len(batch.seq_lens))
        kept = [[width * request] + [-1] * (verify_input.max_tree_depth - 1) for request in requests]
        return there([TOKEN for _ in requests for _ in range(width)]), there([1 for _ in requests]), there(kept)

    eagle_utils.eagle_sample = eagle_sample


def sample_one_token() -> None:
    """Each request gets the same token: the sampler's kernels leave what was in memory, which may be none of the vocabulary."""
    import torch
    from sglang.srt.layers.sampler import Sampler

    sampled = Sampler.forward

    def forward(self: Sampler, *arguments: Any, **options: Any) -> torch.Tensor:
        tokens = sampled(self, *arguments, **options)
        return tokens.copy_(torch.full(tokens.shape, TOKEN, dtype=tokens.dtype))

    Sampler.forward = forward

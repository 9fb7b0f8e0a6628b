"""NEXTN speculation, with its Triton kernels in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cpu_shims.hooks import around


def install() -> None:
    tree_kernels_of_triton()
    no_cuda_to_wait_for()
    around("sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func", places_in_the_cache)


def tree_kernels_of_triton() -> None:
    """Use the Triton kernels for draft trees, which SGLang has for Intel GPUs; the others are CUDA."""
    import sglang.kernels.ops.speculative.spec_tree as spec_tree

    spec_tree._is_xpu = True


def no_cuda_to_wait_for() -> None:
    torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda *_: None


def places_in_the_cache(
    original: Callable[..., Any],
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """The cache locations of the tokens that a step without drafts verifies. Without AMX, SGLang has no kernel for this and
    returns None, and each layer then writes its one token over the whole cache."""
    columns = start_offset.long()[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices.long()[:, None], columns].flatten().long()

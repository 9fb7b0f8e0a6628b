"""NEXTN speculation, its Triton kernels run by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import torch


def install() -> None:
    tree_kernels_of_triton()
    no_cuda_to_wait_for()


def tree_kernels_of_triton() -> None:
    """The kernels over draft trees exist in CUDA, and in Triton for Intel GPUs."""
    import sglang.kernels.ops.speculative.spec_tree as spec_tree

    spec_tree._is_xpu = True


def no_cuda_to_wait_for() -> None:
    torch.cuda.empty_cache = lambda: None
    torch.cuda.synchronize = lambda *_: None

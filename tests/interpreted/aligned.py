"""Prints, as JSON lines, ids and what SGLang's aligner for few ids makes of them: their order, the expert of each block, and
the rows and the blocks of no expert. Run with TRITON_INTERPRET=1."""

from __future__ import annotations

import json

import torch
from sglang.kernels.ops.moe.moe_align_small_numel import moe_align_small_numel

EXPERTS, UNWRITTEN = 80, 1 << 30


def main() -> None:
    random = torch.Generator().manual_seed(1)
    for rows, top_k, block_size in ((1, 8, 16), (2, 8, 64), (8, 8, 2), (6, 4, 1), (64, 1, 8), (5, 3, 16), (1, 1, 128)):
        ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:top_k] for _ in range(rows)]).int()
        ids[torch.rand(ids.shape, generator=random) < 0.2] = -1  # other ranks' experts
        ids[1::2, 0] = ids[0, 0]
        order, blocks = (torch.full((size,), UNWRITTEN, dtype=torch.int32) for size in (ids.numel() * block_size, ids.numel()))
        padded = torch.zeros(2, dtype=torch.int32)
        moe_align_small_numel(ids, EXPERTS + 1, block_size, order, blocks, padded, write_inactive_prefix_count=True)
        lists = [tensor.tolist() for tensor in (order, blocks, padded)]
        print(json.dumps({"ids": ids.tolist(), "block_size": block_size, "lists": lists}))


if __name__ == "__main__":
    main()

"""The vLLM operators that SGLang uses on a CPU without AMX, in plain PyTorch: for rotary embeddings and Triton's MoE runner."""

from __future__ import annotations

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Rotate the leading channels of every head of ``query`` and ``key`` in place."""
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(positions.numel(), -1, head_size)
            rotated = heads[..., : 2 * cos.shape[-1]]
            rotated.copy_(rotate(rotated.float(), cos, sin, is_neox))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Neox pairs channel i with i + half; the other layout pairs adjacent channels."""
    if is_neox:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def moe_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    """Sum ``x[token, k, hidden]`` over k."""
    torch.sum(x, dim=1, out=out)

"""LongCat's n-gram embedding, and its zero-computation experts."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from cpu_shims.hooks import OnCpu, around

_NEWEST = "sglang.kernels.ops.embeddings.ngram_embedding"
KERNELS = _NEWEST if find_spec(_NEWEST) else "sglang.kernels.ops.speculative.ngram_embedding"
"""The module's name before SGLang 0.5.23 is the second."""


def install() -> None:
    around("sglang.srt.layers.n_gram_embedding.NgramEmbedding.__init__", build_on_cpu)
    around(f"{KERNELS}.compute_n_gram_ids", ngram_ids)
    around(f"{KERNELS}.update_token_table", note_tokens)
    around("sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton", identity_experts)


def build_on_cpu(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """The class allocates on CUDA by name."""
    with OnCpu():
        original(*args, **kwargs)


def ngram_ids(
    original: Callable[..., None],
    *,
    ne_n: int,
    ne_k: int,
    ne_weights: torch.Tensor,
    ne_mods: torch.Tensor,
    exclusive_ne_embedder_size_sums: torch.Tensor,
    tokens: torch.Tensor,
    exclusive_req_len_sums: torch.Tensor,
    ne_token_table: torch.Tensor,
    row_indices: torch.Tensor,
    column_starts: torch.Tensor,
    n_gram_ids: torch.Tensor,
    eos_token_id: int,
) -> None:
    """Compute each token's row in each table: a polynomial of the tokens up to it, modulo the table's rows."""
    for request, (row, column) in enumerate(zip(row_indices.tolist(), column_starts.tolist(), strict=True)):
        begin, end = exclusive_req_len_sums[request : request + 2].tolist()
        for place in range(begin, end):
            last = column + place - begin
            for table in range((ne_n - 1) * ne_k):
                n, k = divmod(table, ne_k)
                total, modulus = 0, int(ne_mods[n, k])
                for back in range(min(n + 2, last + 1)):
                    token = int(ne_token_table[row, last - back])
                    if token < 0 or (token == eos_token_id and back):
                        break
                    total += token * int(ne_weights[n, k, back]) % modulus
                n_gram_ids[place, table] = total % modulus + int(exclusive_ne_embedder_size_sums[table])


def note_tokens(
    original: Callable[..., None],
    *,
    ne_token_table: torch.Tensor,
    tokens: torch.Tensor,
    row_indices: torch.Tensor,
    column_starts: torch.Tensor,
    req_lens: torch.Tensor,
    ignore_tokens: torch.Tensor | None = None,
) -> None:
    assert ignore_tokens is None, "SGLang ignores none"
    begin = 0
    for row, column, length in zip(row_indices.tolist(), column_starts.tolist(), req_lens.tolist(), strict=True):
        ne_token_table[row, column : column + length] = tokens[begin : begin + length]
        begin += length


def identity_experts(
    original: Callable[..., torch.Tensor],
    *,
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Compute the identity experts: the input times their weights. SGLang's kernel then sends their places to expert 0 with
    weight 0, but the native expert kernel needs distinct experts per token, and takes -1 for none."""
    assert zero_expert_type == "identity"
    absent = expert_indices >= num_experts
    share = expert_scales.masked_fill(~absent, 0.0).sum(-1, keepdim=True)
    expert_indices[absent] = -1
    expert_scales[absent] = 0.0
    return (hidden_states * share).to(hidden_states.dtype)

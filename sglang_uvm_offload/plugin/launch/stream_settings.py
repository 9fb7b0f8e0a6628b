"""Resolves streaming for a launch: the minimum tokens of a step, and the sizes for which SGLang may capture prefill graphs."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_uvm_offload.config import NEVER, OffloadConfig, RequestedConfig
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.sizing.moe_shape import stated_top_k
from sglang_uvm_offload.sizing.rates import StreamRates
from sglang_uvm_offload.sizing.streaming import break_even_tokens

logger = logging.getLogger(__name__)

USUAL_TOP_K = 8
"""For a model whose config does not state its own."""


def stream_tokens(
    requested: RequestedConfig,
    num_resident: int,
    slots: int,
    buffers: int | None,
    num_experts: int,
    hf_text_config: Any,
    rates: StreamRates | None,
    longest: int,
) -> int:
    """From how many tokens on a step streams: ``NEVER`` where nothing is to be streamed. ``slots``: of a layer. ``buffers``:
    how many there is room for, None if nobody counted. ``rates``: None if unknown. ``longest``: the most tokens of a step."""
    if requested.stream_gb == 0 or requested.stream_tokens == NEVER or num_resident == num_experts:
        return NEVER
    in_vram, tokens = num_resident + slots, requested.stream_tokens
    if tokens is None:
        tokens = break_even_tokens(num_experts, stated_top_k(hf_text_config) or USUAL_TOP_K, in_vram, rates)
        if tokens > longest and requested.stream_gb is None:
            _tell_of_long_steps(in_vram, num_experts, tokens, longest)
            return NEVER
    if buffers != 0:
        return tokens
    if requested.stream_gb is None:
        warn_of_no_room()
    return NEVER


def graph_settings(config: OffloadConfig, cfg: Any) -> dict[str, Any]:
    """Limit prefill graphs to fewer tokens than steps that stream: a replayed graph cannot copy experts first. With attention
    data parallelism, each group replays a graph for its own tokens, and its experts compute the tokens of all groups."""
    graphs, tokens = cfg.cuda_graph_config, config.stream_tokens
    if graphs is None or graphs.prefill.backend == Backend.DISABLED:
        return {}
    sizes = graphs.prefill.bs or []
    kept = [size for size in sizes if size * cfg.attn_dp_size < tokens]
    if kept == sizes:
        return {}
    logger.info(
        "Expert offload: prefill CUDA graphs are captured for up to %s tokens, not %d: steps of %d tokens or more copy experts "
        "into the stream buffers, which a graph cannot do (%s inf keeps the graphs)",
        max(kept, default="no"),
        max(sizes),
        tokens,
        flag_name("stream_tokens"),
    )
    changes: dict[str, Any] = {"bs": kept, "max_bs": max(kept)} if kept else {"backend": Backend.DISABLED}
    prefill = dataclasses.replace(graphs.prefill, **changes)
    return {"cuda_graph_config": dataclasses.replace(graphs, prefill=prefill)}


def _tell_of_long_steps(in_vram: int, num_experts: int, tokens: int, longest: int) -> None:
    logger.info(
        "Expert offload: no step streams, and no VRAM is kept for it: with %d of %d experts of a layer in VRAM, copying them "
        "pays from %d tokens on, and a step has at most %d (--chunked-prefill-size). %s gives another number.",
        in_vram,
        num_experts,
        tokens,
        longest,
        flag_name("stream_tokens"),
    )


def warn_of_no_room() -> None:
    logger.warning(
        "Expert offload: no room for a stream buffer next to the KV cache: long prompts read offloaded experts in place, once "
        "for each block of rows, and are slow. Keep fewer experts resident to make room; %s sets the size.",
        flag_name("stream_buffer_gb"),
    )

"""Limits prefill CUDA graphs to steps that do not stream, because a replayed graph cannot copy experts first."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_context, get_exec, get_parallel

from sglang_uvm_offload.flags import flag_name

logger = logging.getLogger(__name__)


def limit_prefill_graphs(tokens: int) -> None:
    """Capture prefill graphs only below ``tokens``. Call this before graphs are captured. With DP attention, each group replays
    a graph for its own tokens, but experts compute the tokens of all groups."""
    graphs = get_exec().graph.cuda_graph_config
    if graphs is None or graphs.prefill.backend == Backend.DISABLED:
        return
    sizes = graphs.prefill.bs or []
    kept = [size for size in sizes if size * get_parallel().attn_dp_size < tokens]
    if kept == sizes:
        return
    logger.info(
        "Expert offload: prefill CUDA graphs are captured for up to %s tokens instead of %d: steps of %d tokens or more stream "
        "experts, which a graph cannot do (%s inf keeps the graphs)",
        max(kept, default="no"),
        max(sizes),
        tokens,
        flag_name("stream_tokens"),
    )
    changes: dict[str, Any] = {"bs": kept, "max_bs": max(kept)} if kept else {"backend": Backend.DISABLED}
    prefill = dataclasses.replace(graphs.prefill, **changes)
    get_context().override("sglang-uvm-offload", cuda_graph_config=dataclasses.replace(graphs, prefill=prefill))

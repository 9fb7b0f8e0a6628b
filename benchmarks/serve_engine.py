"""What SGLang reports about a server: its backends, and which steps ran as CUDA graphs."""

from __future__ import annotations

import re
from typing import Any

CHOSEN = ("attention_backend", "sampling_backend", "moe_runner_backend", "chunked_prefill_size", "cuda_graph_config")
BATCH = re.compile(r"(Prefill|Decode) batch\b.*\b(?:cuda|cpu) graph: (True|False)")
CAPTURED = re.compile(r"Capture \S+ (?:prefill|decode) CUDA graph end\..*")


def describe(state: dict[str, Any], log: str) -> dict[str, Any]:
    """``state`` is one rank's state in ``/server_info``. SGLang logs only one decode batch in several tens."""
    batches = {"prefill": {"graph": 0, "eager": 0}, "decode": {"graph": 0, "eager": 0}}
    for phase, graph in BATCH.findall(log):
        batches[phase.lower()]["graph" if graph == "True" else "eager"] += 1
    return {
        **{name: state.get(name) for name in CHOSEN},
        "decode_graph_batches": state.get("decode_cuda_graph_bs") or [],
        "captures": CAPTURED.findall(log),
        "batches": batches,
    }

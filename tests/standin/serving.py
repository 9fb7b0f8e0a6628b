"""What tests of real SGLang over the stand-in share: the arguments of a GPU server, and the captures in its log of calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

GPU: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "grammar_backend": "none",
    "disable_cuda_graph": False,
    "cuda_graph_max_bs_decode": 2,
    "max_running_requests": 2,
    "max_total_tokens": 2048,
    "sampling_backend": "pytorch",
    "random_seed": 1,
    "skip_server_warmup": True,
    "log_level": "info",
}


def captures(calls: list[dict]) -> Iterator[list[dict]]:
    """The calls from each begin of a capture to its end."""
    start = None
    for i, call in enumerate(calls):
        if call["call"] == "cudaStreamBeginCapture":
            start = i
        elif call["call"] == "cudaStreamEndCapture":
            assert start is not None
            yield calls[start : i + 1]

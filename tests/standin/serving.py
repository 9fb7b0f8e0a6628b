"""Shared by tests of real SGLang over the stand-in: arguments of a GPU server, and the captures in its call log."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from builders.plugins import saboteur
from standin.build import sglang_environment
from standin.engine import run_engine

from scripts.harness.patience import patience

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
    """Yields the calls of each capture, from begin to end."""
    start = None
    for i, call in enumerate(calls):
        if call["call"] == "cudaStreamBeginCapture":
            start = i
        elif call["call"] == "cudaStreamEndCapture":
            assert start is not None
            yield calls[start : i + 1]


def kept_links(environment: Mapping[str, str]) -> Path:
    """Returns the folder with servers' link measurements."""
    return Path(environment["XDG_CACHE_HOME"]) / "sglang-uvm-offload" / "links"


def serve_and_log(
    job: dict[str, Any],
    first: int,
    library: Path,
    folder: Path,
    plugin: str = "",
    env: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], list[dict]]:
    """Runs an engine whose tokens pick experts from ``first`` on. Returns its answers with its ``log``, and the CUDA calls of
    the serving process. ``plugin`` is the code of another SGLang plugin; ``env`` adds environment variables."""
    environment = sglang_environment(library.parent, folder / "calls.jsonl", library.parent / "caches") | dict(env or {})
    shutil.rmtree(kept_links(environment), ignore_errors=True)  # from another server
    environment |= {"STANDIN_FIRST_EXPERT": str(first), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["STANDIN_LATE"] = "2"  # delays the streams of SGLang's steps and of the copies of counts
    if plugin:
        folder.mkdir(parents=True, exist_ok=True)
        saboteur(folder, plugin)
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment['PYTHONPATH']}"
    result = run_engine(job, folder, environment, seconds=patience(900)) | {"log": (folder / "log.txt").read_text()}
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    # The trial of unified memory runs in a separate process, which captures nothing.
    (served_by,) = {call["pid"] for call in calls if call["call"] == "cudaStreamBeginCapture"}
    return result, [call for call in calls if call["pid"] == served_by]

"""A server that gives up its memory for a while (``--enable-memory-saver``): its experts leave VRAM and come back where they
were, and answers are the same, or those of the weights that came meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.plugins import saboteur
from checkpoints import Checkpoints
from serving import PROMPTS, Engines

from scripts.harness.server import Server, offload_state

# SGLang's library gives up CUDA memory only. Here it keeps it, so that the other weights are there afterwards.
KEPT = """from sglang.srt.utils import torch_memory_saver_adapter as saver
class Kept(saver._TorchMemorySaverAdapterNoop):
    enabled = True
saver._TorchMemorySaverAdapterReal = Kept
"""
FLAGS: dict[str, Any] = {
    **{"dtype": "float32", "enable_memory_saver": True, "expert_offload_num_resident": 6, "expert_offload_warmup_tokens": 16},
    "expert_offload_stream_tokens": 8,
}


def ask(server: Server) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    return [server.post("/generate", {"text": prompt, "sampling_params": sampling})["output_ids"] for prompt in PROMPTS]


@pytest.mark.works("Live change", "release and resume of memory (--enable-memory-saver)")
def test_experts_leave_vram_and_come_back(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    old, new = (checkpoints("qwen3_moe", dtype="float32", seed=seed) for seed in (0, 7))
    expected = [[answer.output_ids for answer in engines.baseline(each, dtype="float32").answers] for each in (old, new)]
    with engines.server(old, env=saboteur(tmp_path, KEPT), **FLAGS) as server:
        assert ask(server) == expected[0]
        before = offload_state(server.get("/server_info"))
        server.wait_until_idle()
        server.post("/release_memory_occupation", {})
        asleep = offload_state(server.get("/server_info"))
        server.post("/resume_memory_occupation", {})
        after = offload_state(server.get("/server_info"))
        assert ask(server) == expected[0]
        server.wait_until_idle()
        server.post("/release_memory_occupation", {})
        server.post("/resume_memory_occupation", {"tags": ["weights"]})
        assert server.post("/update_weights_from_disk", {"model_path": str(new)})["success"]
        server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert ask(server) == expected[1]
    assert before["resident_bytes"] > 0
    assert asleep["resident_bytes"] == 0
    assert asleep["offloaded_bytes"] == before["offloaded_bytes"] + before["resident_bytes"]
    assert after["resident_ids"] == before["resident_ids"]
    assert after["fault"] is None

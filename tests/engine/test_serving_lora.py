"""LoRA adapters beside offloaded experts: each request is answered with its adapter, or with none, as without offloading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from builders.adapters import ATTENTION, EXPERTS, adapter
from builders.plugins import saboteur
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded

from scripts.harness.server import offload_state

# SGLang's LoRA code pins host tensors, which needs a GPU, and has a kernel that lists blocks of experts, or on an XPU a loop.
WITHOUT_GPU = """if multiprocessing.parent_process() is not None and 'sglang.srt.managers.scheduler' in sys.modules:
    import torch
    def unpinned(make):
        return lambda *given, pin_memory=False, **named: make(*given, **named)
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor
    from sglang.srt.lora import lora_moe_runners
    from sglang.kernels.ops.lora.moe import fused_moe_lora_kernel
    lora_moe_runners._is_xpu = True
    fused_moe_lora_kernel.fused_moe_lora = fused_moe_lora_kernel._fused_moe_lora
"""
SERVING: dict[str, Any] = {"dtype": "float32", "lora_backend": "torch_native", "disable_radix_cache": True}
OFFLOAD: dict[str, Any] = {
    **{"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": 8}
}
PROMPTS = ("hello world", "the quick brown fox jumps over 13 lazy dogs")


def ask(
    engines: Engines, checkpoint: Path, env: dict[str, str], prompts: Sequence[str], tokens: int, **arguments: Any
) -> tuple[list[list[list[int]]], dict[str, Any]]:
    """The tokens with an adapter and those without, and the server's state."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    with engines.server(checkpoint, env=env, **SERVING, **arguments) as server:
        said = [
            [
                server.post("/generate", {"text": prompt, "sampling_params": sampling, **adapter})["output_ids"]
                for prompt in prompts
            ]
            for adapter in ({"lora_path": "fox"}, {})
        ]
        return said, server.get("/server_info")


@pytest.mark.nightly
@pytest.mark.works("Live change", "LoRA on attention")
def test_adapters_of_attention_are_served(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    lora = {"lora_paths": f"fox={adapter(checkpoint, tmp_path / 'fox', ATTENTION)}"}
    asked: Any = (engines, checkpoint, saboteur(tmp_path, WITHOUT_GPU), PROMPTS, 12)
    off, _ = ask(*asked, **lora)
    on, info = ask(*asked, **lora, **OFFLOAD)
    assert_offloaded(info)
    assert offload_state(info)["streamed_bytes"] > 0
    assert on == off
    assert off[0] != off[1], "the adapter changes nothing"


@pytest.mark.nightly
@pytest.mark.works("Live change", "LoRA on experts")
def test_adapters_of_experts_are_served_and_counted_and_no_step_streams(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    """By SGLang's Triton kernels under the interpreter, which takes minutes."""
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    lora = {"lora_paths": f"fox={adapter(checkpoint, tmp_path / 'fox', EXPERTS)}", "moe_runner_backend": "triton"}
    env = {**saboteur(tmp_path, WITHOUT_GPU), "TRITON_INTERPRET": "1"}
    asked: Any = (engines, checkpoint, env, PROMPTS[:1], 4)
    off, _ = ask(*asked, **lora)
    on, info = ask(*asked, **lora, **OFFLOAD)
    slotted, with_slots = ask(*asked, **lora, **{**OFFLOAD, "expert_offload_num_resident": 2, "expert_offload_slots": 4})
    assert_offloaded(info)
    state = offload_state(info)
    assert slotted == off
    assert (offload_state(with_slots)["slots"] or {"fills": 0})["fills"] == 0
    assert state["tokens"] > 0
    assert 0 < state["hit_rate"] < 1
    assert (state["zero_copy_bytes"] > 0, state["streamed_bytes"]) == (True, 0)
    assert on == off
    assert off[0] != off[1], "the adapter changes nothing"

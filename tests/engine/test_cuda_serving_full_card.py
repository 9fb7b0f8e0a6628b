"""Real SGLang on a card without free VRAM, over the stand-in driver: long prompts, which need some, end. Kernels compute
nothing there, so tokens say nothing: bytes are compared in tests/compiled/test_cuda_full_card.py."""

from __future__ import annotations

from typing import Any

import pytest
from standin.serving import GPU, serve_and_log

LAYERS, RESIDENT = 8, 12
"""Of 16 experts of 1.5 MiB: 144 MiB of residents."""
STREAM_TOKENS = 16
LONG = "the quick brown fox jumps over the lazy dog "

NOTHING_FREE = """
from sglang_uvm_offload.plugin.rank import vram_limits
from sglang_uvm_offload.residency import manager
bound_torch, manager.CHECK_SECONDS = vram_limits.bound_torch, 0.1
def fill(headroom_gb):
    import ctypes, torch
    bound_torch(headroom_gb)
    free, _ = torch.cuda.mem_get_info()
    assert ctypes.CDLL("libcuda.so.1").cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(free)) == 0
vram_limits.bound_torch = fill
"""
"""Once the cache is there, something else takes all VRAM that is free, as a process may that starts later. So the first eager
prefill, whose GEMMs want a workspace, evicts residents."""


@pytest.mark.nightly
@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "in place"])
def test_long_prompts_end_while_residents_move_and_the_log_names_the_cure(tmp_path, checkpoints, standin, streams):
    model = checkpoints("qwen3_moe", expert_size=1024, layers=LAYERS)
    offload: dict[str, Any] = {"expert_offload_num_resident": RESIDENT, "expert_offload_headroom_gb": 0.0}
    offload |= {"expert_offload_adapt": "continuous", "expert_offload_warmup_tokens": 16}
    offload |= {"expert_offload_stream_tokens": STREAM_TOKENS} if streams else {"expert_offload_stream_buffer_gb": 0.0}
    engine = {"model_path": str(model), **GPU, **offload, "mem_fraction_static": 0.5}
    job = {"engine": engine, "prompts": [LONG * times for times in (3, 4, 5)], "max_new_tokens": 24}
    result, calls = serve_and_log(job, 9, standin.library, tmp_path / "run", plugin=NOTHING_FREE)
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [24] * 3
    state = result["server_info"]["internal_states"][0]["expert_offload"]
    assert state["fault"] is None
    assert state["evicted_bytes"] > 0
    assert (state["streamed_bytes"] > 0) == streams
    assert "of resident experts were evicted from VRAM, because something else needed it" in result["log"]
    assert state["moves"] > 0
    assert {call["result"] for call in calls if call["call"] == "fault"} == {0}
    assert sum(call["call"] == "evict" for call in calls) > 100, "residents that came back had others evicted, step by step"

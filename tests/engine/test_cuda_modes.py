"""Real SGLang over the stand-in driver in modes that no CPU serves: their graphs are captured and replayed, and read experts
where these stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from standin.run import Standin
from standin.serving import GPU, captures, serve_and_log

pytestmark = pytest.mark.nightly
TOKENS = 12
PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog"]
"""The one is prefilled in a graph, the other streams."""
OFFLOAD: dict[str, Any] = {
    **{"expert_offload_num_resident": 4, "expert_offload_headroom_gb": 0.0, "expert_offload_warmup_tokens": 8},
    "expert_offload_stream_tokens": 16,
}
MODES: dict[str, dict[str, Any]] = {
    "hierarchical cache": {"enable_hierarchical_cache": True, "hicache_size": 1},
    "decode role of PD disaggregation": {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"},
}
NOWHERE = {"bootstrap_host": ["2.2.2.2"], "bootstrap_room": [0]}
"""SGLang's address for a decode whose cache comes from nobody."""


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.works("Launch", mode)) for mode in MODES])
def test_graphs_are_replayed_while_experts_move(mode: str, tmp_path: Path, checkpoints: Checkpoints, standin: Standin) -> None:
    decodes = "decode role" in mode
    engine = {"model_path": str(checkpoints("qwen3_moe", expert_size=512)), **GPU, **OFFLOAD, **MODES[mode]}
    job = {"engine": engine, "prompts": PROMPTS, "max_new_tokens": TOKENS, "beside": NOWHERE if decodes else {}}
    result, calls = serve_and_log(job, 9, standin.library, tmp_path / "served")
    assert [call for call in calls if call["result"] != 0] == []
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [TOKENS, TOKENS]
    managed = {call["address"] for call in calls if call["call"] == "cudaMallocManaged"}
    moe = [[c["arguments"][1] for c in capture if c.get("kernel") == "fused_moe_kernel"] for capture in captures(calls)]
    assert {address for capture in moe for address in capture} <= managed
    (state,) = [state["expert_offload"] for state in result["server_info"]["internal_states"]]
    whole = [capture for capture in moe if len(capture) == 2 * state["num_layers"]]
    assert len(whole) == 2  # decode: batches of 1 and of 2
    assert sum(call["call"] == "cudaGraphLaunch" for call in calls) >= 2 * (TOKENS - 1)
    assert state["fault"] is None
    assert state["moves"] > 0
    assert (state["streamed_bytes"] > 0) != decodes


TRACED = """
import torch
original = torch.compile
def compile(model=None, **options):
    return original(model, backend="eager", dynamic=options.get("dynamic"))
torch.compile = compile
"""


@pytest.mark.parametrize("slots", [0, 2])
@pytest.mark.works("Launch", "--enable-torch-compile")
def test_experts_are_read_in_place_and_counted_at_every_batch(
    slots: int, tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    """At batch 1 too, where SGLang would gather the experts of each token into a copy. Nothing is compiled for the stand-in:
    Dynamo traces the model, and what it has traced is run as it is."""
    engine = {"model_path": str(checkpoints("glm4_moe", expert_size=512)), **GPU, **OFFLOAD, "expert_offload_slots": slots}
    job = {"engine": {**engine, "enable_torch_compile": True}, "prompts": PROMPTS, "max_new_tokens": TOKENS}
    result, calls = serve_and_log(job, 9, standin.library, tmp_path / "served", TRACED)
    assert [call for call in calls if call["result"] != 0] == []
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [TOKENS, TOKENS]
    (state,) = [state["expert_offload"] for state in result["server_info"]["internal_states"]]
    managed = {call["address"] for call in calls if call["call"] == "cudaMallocManaged"}
    for decode in list(captures(calls))[-2:]:  # batches of 2 and of 1
        read = [call["arguments"][1] for call in decode if call.get("kernel") == "fused_moe_kernel"]
        assert len(read) == 2 * state["num_layers"]
        assert {*read} <= managed
        counted = [call["blocks"] for call in decode if call.get("kernel") == "uvm_count_routing_kernel"]
        assert counted == [state["num_layers"]]
    assert state["fault"] is None
    assert state["moves"] > 0
    assert state["zero_copy_bytes"] > 0
    assert slots == 0 or (state["slots"]["missing"] is None and state["slots"]["hits"] > 0)


@pytest.mark.works("Live change", "release and resume of memory, by SGLang's own library, with graphs")
def test_memory_is_given_up_and_graphs_replay_where_it_is_again(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    """What SGLang's library unmaps ends the process that uses it. Experts are not its, and leave VRAM by moves."""
    engine = {"model_path": str(checkpoints("qwen3_moe", expert_size=512)), **GPU, **OFFLOAD, "enable_memory_saver": True}
    job = {"engine": engine, "prompts": [*PROMPTS, *PROMPTS], "max_new_tokens": TOKENS, "sleeps": True}
    result, calls = serve_and_log(job, 9, standin.library, tmp_path / "served")
    assert [call for call in calls if call["result"] != 0] == []
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [TOKENS] * 4
    sleeps = [i for i, call in enumerate(calls) if call["call"] == "cuMemUnmap" and calls[i - 1]["call"] != "cuMemUnmap"]
    replays = [i for i, call in enumerate(calls) if call["call"] == "cudaGraphLaunch"]
    assert len(replays) >= 4 * (TOKENS - 1)
    assert min(replays) < min(sleeps) < max(sleeps) < max(replays)
    managed = {call["address"] for call in calls if call["call"] == "cudaMallocManaged"}
    unmapped = {call["address"] for call in calls if call["call"] == "cuMemUnmap"}
    assert not managed & unmapped
    (state,) = [state["expert_offload"] for state in result["server_info"]["internal_states"]]
    assert state["fault"] is None
    assert state["streamed_bytes"] > 0
    assert "of experts out of VRAM until the server resumes" in result["log"]


@pytest.mark.sglang_fails("Parallel", "single-batch overlap on Hopper")
def test_sglang_itself_overlaps_no_single_batch_on_hopper(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin, record_property: Callable[[str, object], None]
) -> None:
    engine = {"model_path": str(checkpoints("deepseek_v3")), **GPU, "enable_single_batch_overlap": True}
    with pytest.raises(AssertionError, match="SBO") as ended:
        serve_and_log({"engine": engine, "prompts": [], "max_new_tokens": 1}, 0, standin.library, tmp_path / "served")
    [reason] = [line for line in str(ended.value).splitlines() if "ValueError: SBO" in line]
    record_property("reason", reason.strip())


LAYERS, RESIDENT = 8, 12
"""12 of 16 experts of 1.5 MiB: 144 MiB of residents."""
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


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "in place"])
def test_long_prompts_end_while_residents_move_and_the_log_names_the_cure(
    streams: bool, tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    """Kernels compute nothing here: bytes are compared in tests/compiled/test_cuda_full_card.py."""
    model = checkpoints("qwen3_moe", expert_size=1024, layers=LAYERS)
    offload: dict[str, Any] = {"expert_offload_num_resident": RESIDENT, "expert_offload_headroom_gb": 0.0}
    offload |= {"expert_offload_adapt": "continuous", "expert_offload_warmup_tokens": 16}
    offload |= {"expert_offload_stream_tokens": 16} if streams else {"expert_offload_stream_buffer_gb": 0.0}
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

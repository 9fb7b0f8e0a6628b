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

TOKENS = 12
PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog"]
"""The one is prefilled in a graph, the other streams."""
OFFLOAD = {
    **{"expert_offload_num_resident": 4, "expert_offload_headroom_gb": 0.0, "expert_offload_warmup_tokens": 8},
    "expert_offload_stream_tokens": 16,
}
MODES: dict[str, dict[str, Any]] = {
    "hierarchical cache": {"enable_hierarchical_cache": True, "hicache_size": 1},
    "decode role of PD disaggregation": {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "fake"},
}
NOWHERE = {"bootstrap_host": ["2.2.2.2"], "bootstrap_room": [0]}
"""SGLang's address for a decode whose cache comes from nobody."""


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    assert "of experts have left VRAM, until the server resumes" in result["log"]


@pytest.mark.nightly
@pytest.mark.sglang_fails("Parallel", "single-batch overlap on Hopper")
def test_sglang_itself_overlaps_no_single_batch_on_hopper(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin, record_property: Callable[[str, object], None]
) -> None:
    engine = {"model_path": str(checkpoints("deepseek_v3")), **GPU, "enable_single_batch_overlap": True}
    with pytest.raises(AssertionError, match="SBO") as ended:
        serve_and_log({"engine": engine, "prompts": [], "max_new_tokens": 1}, 0, standin.library, tmp_path / "served")
    [reason] = [line for line in str(ended.value).splitlines() if "ValueError: SBO" in line]
    record_property("reason", reason.strip())

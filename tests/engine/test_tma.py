"""Weights that SGLang's Triton MoE kernels load by TMA: from a stream buffer, and while experts move."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton
from checkpoints import Checkpoints
from standin.run import Standin
from standin.serving import GPU, captures, serve_and_log

from scripts.harness.patience import patience
from scripts.harness.server import environment

PROGRAM = Path(__file__).parents[1] / "interpreted" / "tma.py"
LAYERS, EXPERTS, INTERMEDIATE, TOKENS = 2, 16, 512, 40
TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2}


@pytest.mark.parametrize("tma", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_layers_that_share_a_stream_buffer_compute_with_their_own_weights_while_these_move(tma: str, tmp_path: Path) -> None:
    """All layers read a buffer at the same address."""
    env = environment({"TRITON_INTERPRET": "1", "SGLANG_MOE_CONFIG_DIR": str(tmp_path)})
    ended = subprocess.run([sys.executable, str(PROGRAM), tma], env=env, capture_output=True, text=True, timeout=patience(120))
    assert ended.returncode == 0, ended.stderr
    outcome = json.loads(ended.stdout)
    assert outcome["fault"] is None
    assert len(outcome["equal"]) == 9
    assert all(outcome["equal"])
    assert (outcome["descriptors"] > 0) == (tma != "off")


def served(model: Path, tma: str, folder: Path, standin: Standin) -> tuple[dict[str, Any], list[dict]]:
    tiles = folder / "tiles" / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    tiles.mkdir(parents=True)
    for which in ("", "_down"):
        name = f"E={EXPERTS},N={INTERMEDIATE},device_name=NVIDIA_H200{which}.json"
        (tiles / name).write_text(json.dumps({"1": {**TILE, "USE_TMA": True}}))
    offload = {
        **{"expert_offload_num_resident": 4, "expert_offload_headroom_gb": 0.0, "expert_offload_warmup_tokens": 8},
        **{"expert_offload_stream_tokens": 16, "expert_offload_adapt": "continuous", "expert_offload_tma": tma},
    }
    job = {
        "engine": {"model_path": str(model), **GPU, **offload},
        "prompts": ["hello world", "the quick brown fox jumps over the lazy dog"] * 2,
        "max_new_tokens": TOKENS,
    }
    return serve_and_log(job, 9, standin.library, folder / "served", env={"SGLANG_MOE_CONFIG_DIR": str(folder / "tiles")})


def ranges(calls: list[dict]) -> list[range]:
    taken = [call for call in calls if call["call"] == "cudaMallocManaged"]
    return [range(call["address"], call["address"] + call["nbytes"]) for call in taken]


@pytest.mark.parametrize("tma", ["on", pytest.param("off", marks=pytest.mark.nightly)])
def test_tensor_maps_are_of_the_experts_in_graphs_and_of_the_buffers_in_long_prompts(
    tma: str, tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    result, calls = served(checkpoints("qwen3_moe", expert_size=INTERMEDIATE, layers=LAYERS), tma, tmp_path, standin)
    assert [call for call in calls if call["result"] != 0] == []
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [TOKENS] * 4
    (state,) = [state["expert_offload"] for state in result["server_info"]["internal_states"]]
    assert (state["fault"], state["streaming"]["fault"]) == (None, None)
    assert state["moves"] > 0
    assert state["streamed_bytes"] > 0
    managed = ranges(calls)
    maps = [call["address"] for call in calls if call["call"] == "cuTensorMapEncodeTiled" and call["rank"] == 3]
    captured = [
        call["address"]
        for capture in captures(calls)
        for call in capture
        if call["call"] == "cuTensorMapEncodeTiled" and call["rank"] == 3
    ]
    if tma == "off":
        assert maps == []
        assert "do not use TMA loads for weights" in result["log"]
        return
    experts = {it.start for it in managed[: 2 * LAYERS]}
    assert set(captured) == experts
    elsewhere = [address for address in maps if address not in experts]
    assert elsewhere
    assert not any(address in it for address in elsewhere for it in managed)

"""SGLang's DeepGEMM runner, compiled for Hopper and launched over the stand-in driver: what it is told of the experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nursery import Nurseries
from standin.serving import GPU as SERVER
from standin.serving import captures, serve_and_log

from sglang_uvm_offload.cuda.build import find_nvcc

ROOT = Path(__file__).resolve().parents[2]
E, SLOTS, HIDDEN, INTERMEDIATE = 8, 3, 512, 256
ROWS = {"w13_weight": 2 * INTERMEDIATE, "w2_weight": HIDDEN}
"""The rows of one expert."""
PROGRAM = f"""
    import json, sys
    sys.path.insert(0, {str(ROOT)!r})
    import numpy as np
    from benchmarks.gpu.moe_deep_gemm import CONTIGUOUS, MASKED, MaskedDeepGemm, SglangDeepGemm
    from benchmarks.gpu.moe_function import MoeShape, Replayed, ServedLayer
    from benchmarks.gpu.timing import capture
    from sglang_uvm_offload.cuda.memory import CudaMemory

    shape = MoeShape(experts={E}, top_k=2, hidden={HIDDEN}, intermediate={INTERMEDIATE})
    served = ServedLayer(CudaMemory(), SglangDeepGemm.weights(shape), np.arange({E}) < 2, {SLOTS})
    for function in (SglangDeepGemm, MaskedDeepGemm):
        served.begin_step(0)
        step = Replayed(function(shape, 4, served.find), served.weights, capture)
        step.outputs(np.array([[2, 3], [3, 4], [0, 1], [2, 7]], dtype=np.int32))
    print(json.dumps({{name: each.data_ptr() for name, each in served.weights.items()}}))
"""

pytestmark = pytest.mark.nightly
"""``unit/test_plugin_slot_seam_deep_gemm.py`` has SGLang's runner on a CPU in every run."""


@pytest.fixture(scope="module")
def ran(sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """The layer's addresses, and the calls."""
    folder = tmp_path_factory.mktemp("deep_gemm")
    env = {"STANDIN_LOG": str(folder / "calls.jsonl"), "SGLANG_DG_CACHE_DIR": str(folder / "kernels")}
    env |= {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}  # seventy kernels of which two are used; read as SGLang is imported
    ended = sglang_on_standin.run(PROGRAM, CUDA_HOME=str(find_nvcc().parents[1]), **env)
    assert ended.code == 0, ended.err[-3000:]
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return json.loads(ended.out.splitlines()[-1]), calls


@pytest.mark.parametrize("name", ROWS)
def test_descriptors_reach_the_rows_of_slots_in_the_contiguous_layout_only(ran, name):
    addresses, calls = ran
    maps = [call for call in calls if call["call"] == "cuTensorMapEncodeTiled" and call["address"] == addresses[name]]
    assert {call["outer"] for call in maps} == {(E + SLOTS) * ROWS[name], E * ROWS[name]}
    assert maps[0]["outer"] > maps[-1]["outer"], "the masked layout came last"


def test_its_kernels_are_captured_after_the_slots_were_resolved(ran):
    _, calls = ran
    captured: dict[int, list[str]] = {}
    for call in calls:
        if call.get("graph") and "kernel" in call:
            captured.setdefault(call["graph"], []).append(call["kernel"])
    contiguous, masked = captured.values()

    def at(kernels: list[str], name: str) -> list[int]:
        return [place for place, kernel in enumerate(kernels) if name in kernel]

    [resolved] = at(contiguous, "resolve_slots")
    gemms = at(contiguous, "sm90_m_grouped_fp8_gemm_contiguous")
    assert (len(gemms), resolved < gemms[0]) == (2, True)
    assert len(at(masked, "sm90_fp8_m_grouped_gemm_masked")) == 2
    assert not at(masked, "resolve_slots")


def test_every_graph_of_a_server_resolves_the_slots_of_each_layer_before_its_gemms(
    checkpoints, standin, tmp_path_factory, monkeypatch
):
    """Decode and prefill graphs, as a server captures them by default."""
    folder, layers = tmp_path_factory.mktemp("served"), 3
    for name, value in (
        ("JIT_DEEPGEMM_PRECOMPILE", "0"),
        ("DEEPGEMM_STANDARD_LAYOUT", "compact"),
        ("DG_CACHE_DIR", str(folder)),
    ):
        monkeypatch.setenv(f"SGLANG_{name}", value)
    monkeypatch.setenv("CUDA_HOME", str(find_nvcc().parents[1]))
    model = checkpoints("qwen3_moe", quant="fp8", expert_size=512, layers=layers)
    engine = {"model_path": str(model), **SERVER, "moe_runner_backend": "deep_gemm", "fp8_gemm_runner_backend": "triton"}
    engine |= {"mem_fraction_static": 0.5, "expert_offload_num_resident": 4, "expert_offload_resident_selection": "first_n"}
    engine |= {"expert_offload_slots": 4, "expert_offload_stream_tokens": "inf"}
    job = {"engine": engine, "prompts": ["hello"], "max_new_tokens": 4}
    result, calls = serve_and_log(job, 9, standin.library, folder)
    assert result["answers"][0]["meta_info"]["completion_tokens"] == 4
    layered = 0
    for capture in captures(calls):
        ran = [call["kernel"].split(".")[0] for call in capture if "kernel" in call]
        ours = [name for name in ran if name.startswith(("uvm_resolve_slots", "sm90_"))]
        assert ours == ["uvm_resolve_slots_kernel", *2 * ["sm90_m_grouped_fp8_gemm_contiguous_1d2d"]] * (len(ours) // 3)
        layered += len(ours) // 3
    assert layered >= 2 * layers
    assert [call for call in calls if call["call"] == "cudaGraphLaunch"]

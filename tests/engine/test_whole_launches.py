"""Whole launch lines, as they are given on machines of several GPUs: ``doctor`` and the launch over the stand-in driver, with
checkpoints of true shape."""

from __future__ import annotations

from typing import Any

import pytest
from builders import true_shape
from launches import launched
from nursery import Ended, Nurseries

GIB = 1 << 30
EIGHT_H20 = {"STANDIN_GPUS": "8", "STANDIN_VRAM": str(96 * GIB), "STANDIN_NAME": "NVIDIA H20"}
LINE = [
    *("--tp-size", "8", "--page-size", "256", "--enable-flashinfer-allreduce-fusion"),
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"),
    *("--expert-offload-num-resident", "200", "--expert-offload-prefetch", "speculative"),
]
DOCTOR = """
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plugin.launch import estimate, ranks
estimate.host_available = ranks.host_available = lambda: 1500 << 30
raise SystemExit(main(["doctor", "--", *{argv!r}]))
"""


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = true_shape.checkpoint("zai-org/GLM-5-FP8", tmp_path_factory.mktemp("models") / "GLM-5-FP8")
    return ["--model-path", str(model), *LINE]


@pytest.fixture(scope="module")
def diagnosis(line: list[str], sglang_on_standin: Nurseries) -> Ended:
    return sglang_on_standin.run(DOCTOR.format(argv=line), **EIGHT_H20)


@pytest.fixture(scope="module")
def launch(line: list[str], sglang_on_standin: Nurseries) -> dict[str, dict[str, Any]]:
    cases = {"as it is": line, "adaptive": [*line, "--speculative-adaptive"]}
    jobs = {name: {"argv": argv, "resolve": True} for name, argv in cases.items()}
    return launched(jobs, sglang_on_standin, **EIGHT_H20)


@pytest.mark.works("Launch", "GLM-5-FP8 on 8x H20, with drafts and a hierarchical cache")
@pytest.mark.since("0.5.23", "it does not know all of these flags")
def test_doctor_is_ready_for_glm_5_on_eight_h20(diagnosis: Ended) -> None:
    assert diagnosis.code == 0, diagnosis.out + diagnosis.err[-2000:]
    for fact in (
        "GPU 7 (sm_90) can keep experts in unified memory",
        "--expert-offload-num-resident 200 of 256 experts a layer, on --tp-size 8",
        "--moe-runner-backend auto",
        "--speculative-algorithm EAGLE with the draft layers of",
    ):
        assert f"  ok       {fact}" in diagnosis.out, diagnosis.out
    assert "estimated: 200 of 256 experts a layer in VRAM" in diagnosis.out
    assert "WARNING  --expert-offload-num-resident" not in diagnosis.out
    assert diagnosis.out.splitlines()[-1] == "ready to serve this launch"


@pytest.mark.since("0.5.23", "it does not know all of these flags")
def test_the_launch_keeps_every_flag_of_the_line(launch: dict[str, dict[str, Any]]) -> None:
    ended = launch["as it is"]
    assert ended["exit"] is None, ended["error"]
    assert ended["flags"]["expert_offload_num_resident"] == "200"
    assert ended["flags"]["expert_offload_prefetch"] == "speculative"


@pytest.mark.works("Speculation", "adaptive steps (--speculative-adaptive), as a launch")
@pytest.mark.since("0.5.23", "its adaptive drafts were tried with none that is older")
def test_the_launch_with_adaptive_speculation_is_accepted(launch: dict[str, dict[str, Any]]) -> None:
    ended = launch["adaptive"]
    assert ended["exit"] is None, ended["error"]
    assert "speculative_adaptive disabled" not in ended["error"]

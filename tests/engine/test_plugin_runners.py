"""The MoE runners that SGLang itself chooses on Blackwell: refused before loading where their routing must be counted."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from checkpoints import Checkpoints
from launches import BLACKWELL, launched
from nursery import Nurseries

N, SELECTION, ADAPT = "--expert-offload-num-resident", "--expert-offload-resident-selection", "--expert-offload-adapt"
GPU = ["--device", "cuda", "--sampling-backend", "pytorch", "--grammar-backend", "none", N, "4"]
FIRST_N = [SELECTION, "first_n"]


@pytest.fixture(scope="module")
def launch(checkpoints: Checkpoints, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runners")
    qwen, oss = [["--model-path", str(checkpoints(family)), *GPU] for family in ("qwen3_moe", "gpt_oss")]
    mxfp4 = shutil.copytree(checkpoints("gpt_oss"), folder / "mxfp4")
    config = json.loads((mxfp4 / "config.json").read_text())
    (mxfp4 / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    trace = ["--expert-offload-config", json.dumps({"trace": f"{folder}/t.npz"})]
    cases = {
        "by default": qwen,
        "everything": [*qwen, ADAPT, "continuous", *trace, "--cpu-offload-gb", "2", "--expert-offload-headroom-gb", "20"],
        "continuous": [*qwen, *FIRST_N, ADAPT, "continuous"],
        "uncounted": [*qwen, *FIRST_N],
        "routed": [*qwen, "--moe-runner-backend", "flashinfer_trtllm_routed"],
        "triton": [*qwen, "--moe-runner-backend", "triton"],
        "mxfp4": ["--model-path", str(mxfp4), *GPU],
        "tokens per expert": oss,
        "tokens per expert, trace": [*oss, *trace],
    }
    return launched({name: {"argv": argv, "resolve": True} for name, argv in cases.items()}, sglang_on_standin, **BLACKWELL)


IN_KERNEL = "flashinfer_trtllm (SGLang's choice for this model and GPU) routes in its kernel"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("by default", [f"{SELECTION} frequency: --moe-runner-backend {IN_KERNEL}", "triton or flashinfer_trtllm_routed"]),
        (
            "everything",
            [
                *[f"{SELECTION} frequency: ", f"{ADAPT} continuous: ", "--expert-offload-config trace '"],
                *["--cpu-offload-gb: cannot be combined", "--expert-offload-headroom-gb 20.0: leaves nothing"],
            ],
        ),
        ("continuous", [f"{ADAPT} continuous: --moe-runner-backend {IN_KERNEL}"]),
        ("mxfp4", [f"{SELECTION} frequency: --moe-runner-backend flashinfer_mxfp4 (SGLang's", "triton_kernel or marlin"]),
        ("tokens per expert, trace", ["t.npz': --moe-runner-backend triton_kernel shows the tokens of each expert"]),
    ],
)
def test_what_needs_the_routing_is_refused_with_the_runner_that_shows_it(launch, case, parts):
    assert launch[case]["exit"] == 2, launch[case]["error"]
    for part in parts:
        assert part in launch[case]["error"]


@pytest.mark.parametrize("case", ["uncounted", "routed", "triton", "tokens per expert"])
def test_what_needs_no_routing_or_is_shown_it_is_served(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert ("no hit rate is measured" in launch[case]["error"]) == (case == "uncounted")


@pytest.mark.parametrize(("case", "disabled"), [("uncounted", True), ("routed", True), ("triton", False)])
def test_flashinfer_tunes_nothing_over_pcie(launch, case, disabled):
    assert launch[case]["flags"]["disable_flashinfer_autotune"] == disabled

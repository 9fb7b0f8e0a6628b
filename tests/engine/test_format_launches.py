"""Launches of published checkpoints of true shape, whose dtype or quantisation their config.json does not name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders.true_shape import checkpoint
from launches import BLACKWELL, launched
from nursery import Nurseries

from scripts.harness.server import flags

N = "--expert-offload-num-resident"
GPU = {"device": "cuda", "sampling_backend": "pytorch", "grammar_backend": "none", "skip_tokenizer_init": True}
OSS, PACKED, PLAIN = "openai/gpt-oss-20b", "nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-30B-A3B"


@pytest.fixture(scope="module")
def launch(sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    held: dict[str, Path] = {model: checkpoint(model, folder / model.replace("/", "--")) for model in (OSS, PACKED, PLAIN)}
    common = {**GPU, "context_length": 1024, "max_running_requests": 1, "max_total_tokens": 4096}
    common["expert_offload_resident_selection"] = "first_n"  # kernels that show no routing need it
    few = {**common, "expert_offload_num_resident": 1}
    cases = {
        "no dtype, auto": {**common, "model_path": held[OSS], "expert_offload_num_resident": "auto"},
        "no dtype, a number": {**few, "model_path": held[OSS]},
        "no dtype, too many": {**few, "model_path": held[OSS], "expert_offload_num_resident": 32},
        "confirmed": {**few, "model_path": held[PACKED], "quantization": "modelopt_fp4"},
        "found": {**few, "model_path": held[PACKED]},
        "converted": {**few, "model_path": held[PLAIN], "quantization": "fp8"},
        "converted, auto": {**common, "model_path": held[PLAIN], "quantization": "fp8", "expert_offload_num_resident": "auto"},
        "not as it comes": {**few, "model_path": held[PLAIN], "quantization": "awq"},
        "float32": {**few, "model_path": held[PLAIN], "dtype": "float16"},
    }
    jobs = {name: {"argv": flags(case), "resolve": True} for name, case in cases.items()}
    return launched(jobs, sglang_on_standin, **BLACKWELL)


@pytest.mark.parametrize("case", ["no dtype, auto", "no dtype, a number", "confirmed", "found", "float32"])
def test_what_the_headers_hold_is_checked_against_vram(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert "not checked" not in launch[case]["error"]


def test_residents_that_do_not_fit_are_refused_without_a_dtype_in_the_config(launch):
    assert launch["no dtype, too many"]["exit"] == 2
    assert f"{N} 32: does not fit on GPU 0" in launch["no dtype, too many"]["error"]


@pytest.mark.parametrize("case", ["converted", "converted, auto"])
def test_a_quantisation_that_the_launch_makes_is_counted_and_named(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert "--quantization fp8 converts the checkpoint as it loads: its experts are counted at 8 bits" in launch[case]["error"]
    assert "not checked" not in launch[case]["error"]


def test_a_quantisation_that_needs_a_file_which_is_not_there_ends_the_launch(launch):
    """As ``model_loader.weight_utils.get_quant_config`` does, behind the start of the ranks."""
    assert launch["not as it comes"]["exit"] == 2
    assert "--quantization awq: " in launch["not as it comes"]["error"]
    assert "quant_config.json" in launch["not as it comes"]["error"]

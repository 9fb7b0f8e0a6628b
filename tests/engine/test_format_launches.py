"""What ``doctor`` estimates of published checkpoints of true shape, whose config.json names no dtype or quantisation."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders.judged import UNKNOWN, Launch, judged, verdict
from builders.true_shape import checkpoint
from nursery import Nurseries

pytestmark = pytest.mark.nightly
"""``test_estimate`` and ``test_engine_shape`` have dtypes and quantisation in every run."""
N = "--expert-offload-num-resident"
GPU = ["--device", "cuda", "--sampling-backend", "pytorch", "--grammar-backend", "none", "--skip-tokenizer-init"]
TOKENS = ["--context-length", "1024", "--max-running-requests", "1", "--max-total-tokens", "4096"]
UNSEEN = ["--expert-offload-resident-selection", "first_n"]
"""What kernels need that show no routing."""
OSS, PACKED, PLAIN = "openai/gpt-oss-20b", "nvidia/Qwen3-235B-A22B-NVFP4", "Qwen/Qwen3-30B-A3B"
CASES: dict[str, tuple[str, str, list[str], str]] = {
    "no dtype, auto": (OSS, "auto", [], "32 of 32"),
    "no dtype, a number": (OSS, "1", [], "1 of 32"),
    "confirmed": (PACKED, "1", ["--quantization", "modelopt_fp4"], "1 of 128"),
    "found": (PACKED, "1", [], "1 of 128"),
    "converted": (PLAIN, "1", ["--quantization", "fp8"], "1 of 128"),
    "converted, auto": (PLAIN, "auto", ["--quantization", "fp8"], "128 of 128"),
    "float32": (PLAIN, "1", ["--dtype", "float16"], "1 of 128"),
}


@pytest.fixture(scope="module")
def said(sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | str, str]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    held: dict[str, Path] = {model: checkpoint(model, folder / model.replace("/", "--")) for model in (OSS, PACKED, PLAIN)}
    launches = {
        name: Launch(("--model-path", str(held[model]), *GPU, *TOKENS, *UNSEEN, N, number, *more), gpu="B200")
        for name, (model, number, more, _) in CASES.items()
    }
    found = judged(list(launches.values()), sglang_on_standin)
    return {name: found[launch] for name, launch in launches.items()}


@pytest.mark.parametrize("case", CASES)
def test_what_the_headers_hold_is_estimated(said: dict[str, tuple[int | str, str]], case: str) -> None:
    code, text = said[case]
    assert code == 0, text
    assert not UNKNOWN.search(text), text
    assert verdict(text) == f"served: {CASES[case][3]} experts a layer resident"

"""Which devices a launch is checked on, by the arguments that SGLang resolves on a GPU machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from arguments import Arguments
from checkpoints import Checkpoints

from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import devices


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", expert_size=512)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ((), [0]),
        (("--tp-size", 2, "--dp-size", 2, "--base-gpu-id", 4), [4, 5, 6, 7]),
        (("--tp-size", 16, "--nnodes", 2, "--dist-init-addr", "127.0.0.1:1"), list(range(8))),
        (("--tp-size", 8, "--pp-size", 2, "--nnodes", 4, "--dist-init-addr", "127.0.0.1:1"), [0, 1, 2, 3]),
    ],
)
def test_every_gpu_of_the_launch_on_this_machine_is_checked(
    monkeypatch: pytest.MonkeyPatch, cuda_arguments: Arguments, model: Path, words: tuple[object, ...], gpus: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("sglang_uvm_offload.cuda.device.device_problems", lambda gpu: seen.append(gpu) or [f"GPU {gpu}"])
    cfg = resolving_view(cuda_arguments("--model-path", model, "--device", "cuda", *words))
    assert devices.problems(cfg) == [f"GPU {gpu}" for gpu in gpus]
    assert seen == gpus

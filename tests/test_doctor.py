"""The doctor: what it calls ready is served, and what is not it explains, with an exit code that scripts can use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import Checkpoints
from serving import environment
from standin.build import sglang_environment
from standin.run import Standin


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("sglang-uvm-offload")), "doctor", *arguments]
    return subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=240)


def test_a_cpu_machine_with_a_model_is_ready(checkpoints: Checkpoints):
    model = str(checkpoints("qwen3_moe"))
    said = doctor("--device", "cpu", "--model-path", model, "--num-resident", "4")
    assert said.returncode == 0, said.stdout + said.stderr[-2000:]
    assert "SGLang has every hook point" in said.stdout
    assert f"{model} can be served with --expert-offload-num-resident 4" in said.stdout
    assert said.stdout.splitlines()[-1] == "ready to serve with --device cpu"


def test_every_problem_is_named_at_once(checkpoints: Checkpoints):
    said = doctor(
        *("--device", "cuda", "--model-path", str(checkpoints("qwen3_moe")), "--num-resident", "40"),
        SGLANG_PLUGINS="something_else",
    )
    assert said.returncode == 1
    problems = [line for line in said.stdout.splitlines() if "PROBLEM" in line]
    assert any("SGLANG_PLUGINS=something_else" in line for line in problems)
    assert any("NVIDIA driver" in line for line in problems)
    assert any("40" in line or "cannot serve" in line for line in problems)
    assert said.stdout.splitlines()[-1] == f"cannot serve with --device cuda: {len(problems)} problem(s)"


def test_auto_is_told_as_a_number_where_there_is_a_gpu(checkpoints: Checkpoints, standin: Standin, tmp_path: Path):
    env = sglang_environment(standin.library.parent, tmp_path / "calls.jsonl", tmp_path / "caches")
    model = str(checkpoints("qwen3_moe"))
    said = doctor("--device", "cuda", "--model-path", model, "--num-resident", "auto", **env)
    assert said.returncode == 0, said.stdout + said.stderr[-2000:]
    assert f"{model} can be served with --expert-offload-num-resident auto, which is 16 here" in said.stdout
    without = doctor("--device", "cpu", "--model-path", model, "--num-resident", "auto")
    assert without.returncode == 1
    assert "--expert-offload-num-resident auto: with --device cpu there is no VRAM to fit experts in" in without.stdout


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({}, 0, "can keep experts in unified memory"),
        ({"STANDIN_ATTRIBUTE_89": "0"}, 1, "concurrentManagedAccess"),
    ],
)
def test_a_gpu_is_asked_what_it_can(settings, code, words, standin: Standin, tmp_path: Path):
    env = sglang_environment(standin.library.parent, tmp_path / "calls.jsonl", tmp_path / "caches")
    said = doctor("--device", "cuda", **env, **settings)
    assert words in said.stdout, said.stdout + said.stderr[-2000:]
    assert said.returncode == code

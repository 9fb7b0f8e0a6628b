"""The doctor: what it calls ready is served, and what is not it explains, with an exit code that scripts can use."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from harness.server import environment
from nursery import Ended, Nursery, Starts


def doctor(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("sglang-uvm-offload")), "doctor", *arguments]
    return subprocess.run(command, env=environment(env), capture_output=True, text=True, timeout=600)


def doctor_in(python: Nursery | Starts, *arguments: str, **env: str) -> Ended:
    """The same command in a process of ``python``."""
    command = f"from sglang_uvm_offload.cli.main import main\nraise SystemExit(main({['doctor', *arguments]!r}))"
    return python.run(command, **env)


SEVERAL = """
import contextlib, io, json
from sglang_uvm_offload.cli.main import main
answers = []
for words in {questions}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(["doctor", "--device", "cpu", *words])
    answers.append((code, said.getvalue()))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(checkpoints: Checkpoints, sglang: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """For each question, the exit code and what was said."""
    whole, folder = checkpoints("qwen3_moe"), tmp_path_factory.mktemp("broken")

    def copy(name: str, **changes: Any) -> Path:
        copied = shutil.copytree(whole, folder / name)
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(json.dumps(config | changes))
        return copied

    models = {
        "architectures": copy("architectures", architectures=None),
        "experts": copy("experts", num_experts="x"),
        "layers": copy("layers", num_hidden_layers=None),
        "hidden": copy("hidden", hidden_size=[1]),
        "quantization": copy("quantization", quantization_config=5),
        **{name: copy(name) for name in ("no weights", "cut short", "other weights")},
        "a file": whole / "config.json",
    }
    (models["no weights"] / "model.safetensors").unlink()
    (models["cut short"] / "model.safetensors").write_bytes(bytes(20))
    (models["other weights"] / "model.safetensors").rename(models["other weights"] / "pytorch_model.bin")
    questions = {name: ["--num-resident", "2", "--model-path", str(path)] for name, path in models.items()}
    questions["no number"] = ["--num-resident", "abc"]
    questions["no number, cut short"] = ["--num-resident", "abc", "--model-path", str(models["cut short"])]
    ran = sglang.run(SEVERAL.format(questions=list(questions.values())))
    assert ran.code == 0, ran.err[-2000:]
    return dict(zip(questions, json.loads(ran.out.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("architectures", "architectures: TypeError: 'NoneType' object"),
        (
            "experts",
            "Error: Validation error for field 'num_experts': TypeError: Field 'num_experts' expected int",
        ),
        ("layers", "'num_hidden_layers' expected int"),
        ("hidden", "'hidden_size' expected int"),
        ("quantization", "AttributeError: 'int' object has no attribute"),
        ("no weights", "no weights holds no *.safetensors file"),
        ("cut short", "model.safetensors: not a safetensors file, or cut short"),
        ("a file", "config.json is a file: give the checkpoint's folder"),
        ("no number", "--expert-offload-num-resident 'abc': must be a whole number of experts"),
    ],
)
def test_a_model_that_cannot_be_read_is_a_problem_and_no_traceback(answers, case: str, words: str):
    code, said = answers[case]
    assert code == 1
    problems = [line for line in said.splitlines() if "PROBLEM" in line]
    assert len(problems) == 1, said
    assert words in problems[0]
    assert "can be served" not in said


def test_a_malformed_flag_hides_no_damage(answers):
    _, said = answers["no number, cut short"]
    assert "model.safetensors: not a safetensors file" in said
    assert "'abc': must be a whole number" in said


def test_weights_that_only_sglang_can_read_are_left_to_it(answers):
    code, said = answers["other weights"]
    assert code == 0, said
    assert "other weights can be served" in said


def test_a_cpu_machine_with_a_model_is_ready(checkpoints: Checkpoints):
    model = str(checkpoints("qwen3_moe"))
    said = doctor("--device", "cpu", "--model-path", model, "--num-resident", "4")
    assert said.returncode == 0, said.stdout + said.stderr[-2000:]
    assert "SGLang has every hook point" in said.stdout
    assert f"{model} can be served with --expert-offload-num-resident 4" in said.stdout
    assert said.stdout.splitlines()[-1] == "ready to serve with --device cpu"


def test_every_problem_is_named_at_once(checkpoints: Checkpoints, sglang: Nursery):
    arguments = ("--device", "cuda", "--model-path", str(checkpoints("qwen3_moe")), "--num-resident", "40")
    said = doctor_in(sglang, *arguments, SGLANG_PLUGINS="something_else")
    assert said.code == 1
    problems = [line for line in said.out.splitlines() if "PROBLEM" in line]
    assert any("SGLANG_PLUGINS=something_else" in line for line in problems)
    assert any("NVIDIA driver" in line for line in problems)
    assert any("40" in line or "cannot serve" in line for line in problems)
    assert said.out.splitlines()[-1] == f"cannot serve with --device cuda: {len(problems)} problem(s)"


def test_auto_is_told_as_a_number_where_there_is_a_gpu(checkpoints: Checkpoints, sglang: Nursery, sglang_on_standin: Starts):
    model = str(checkpoints("qwen3_moe"))
    said = doctor_in(sglang_on_standin, "--device", "cuda", "--model-path", model, "--num-resident", "auto")
    assert said.code == 0, said.out + said.err[-2000:]
    assert f"{model} can be served with --expert-offload-num-resident auto, which is 16 here" in said.out
    assert "can keep experts in unified memory" in said.out
    without = doctor_in(sglang, "--device", "cpu", "--model-path", model, "--num-resident", "auto")
    assert without.code == 1
    assert "--expert-offload-num-resident auto: with --device cpu there is no VRAM to fit experts in" in without.out


def test_a_gpu_that_cannot_page_is_a_problem(sglang_on_standin: Starts):
    said = doctor_in(sglang_on_standin, "--device", "cuda", STANDIN_ATTRIBUTE_89="0")
    assert "concurrentManagedAccess" in said.out, said.out + said.err[-2000:]
    assert "can keep experts in unified memory" not in said.out
    assert said.code == 1

"""The doctor: it calls ready what can be served, explains what cannot, and exits with a code that scripts can use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.hostile import Hostile
from checkpoints import Checkpoints
from launches import BLACKWELL
from nursery import Ended, Nurseries, Nursery

from scripts.harness.patience import patience
from scripts.harness.server import SHIMS, environment
from sglang_uvm_offload.files.kinds import NO_GGUF


def doctor(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The installed command, started in ``folder``."""
    command = [str(Path(sys.executable).with_name("sglang-uvm-offload")), "doctor", *arguments]
    return subprocess.run(command, env=environment(env), cwd=folder, capture_output=True, text=True, timeout=patience(600))


def doctor_in(python: Nursery | Nurseries, *arguments: str, **env: str) -> Ended:
    """The same command in a process of ``python``."""
    command = f"from sglang_uvm_offload.cli.main import main\nraise SystemExit(main({['doctor', *arguments]!r}))"
    return python.run(command, **env)


SEVERAL = """
import contextlib, io, json
from sglang_uvm_offload.cli.main import main
answers = []
for words in {questions}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            code = main(["doctor", "--", "--device", "cpu", *words])
        except SystemExit as exit:
            code = exit.code
    answers.append((code, said.getvalue()))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(checkpoints: Checkpoints, sglang: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """The exit code and the output for each question."""
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
        "gguf": folder / "model.gguf",
        "a folder of gguf": folder,
    }
    models["gguf"].write_bytes(b"GGUF" + bytes(20))
    (models["no weights"] / "model.safetensors").unlink()
    (models["cut short"] / "model.safetensors").write_bytes(bytes(20))
    (models["other weights"] / "model.safetensors").rename(models["other weights"] / "pytorch_model.bin")
    model, resident = "--model-path", "--expert-offload-num-resident"
    questions = {name: [model, str(path), resident, "2"] for name, path in models.items()}
    questions["no number"] = [model, str(whole), resident, "abc"]
    questions["no number, cut short"] = [model, str(models["cut short"]), resident, "abc"]
    questions["offloading is off"] = [model, str(whole)]
    questions["unknown flag"] = [*questions["no number"], "--expert-offload-residents", "3"]
    questions["bad choice"] = [*questions["no number"], "--expert-offload-adapt", "sometimes"]
    (folder / "server.yaml").write_text(f"model-path: {whole}\ndevice: cpu\nexpert-offload-num-resident: 3\n")
    questions["no weights, dummy"] = [model, str(models["no weights"]), resident, "2", "--load-format", "dummy"]
    questions["draft cut short"] = [
        *[model, str(whole), resident, "2", "--speculative-draft-model-path", str(models["cut short"])],
        *["--speculative-algorithm", "STANDALONE", "--speculative-num-steps", "2"],
        *["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"],
    ]
    questions["yaml"] = ["--config", str(folder / "server.yaml")]
    questions["ranks and drafts"] = [
        *[model, str(checkpoints("glm4_moe")), resident, "4", "--tp-size", "2", "--ep-size", "2"],
        *["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2"],
        *["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"],
    ]
    ran = sglang.run(SEVERAL.format(questions=list(questions.values())))
    assert ran.code == 0, ran.err[-2000:]
    return dict(zip(questions, json.loads(ran.out.splitlines()[-1]), strict=True))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("architectures", "SGLang refuses: TypeError: 'NoneType' object"),
        (
            "experts",
            "Error: Validation error for field 'num_experts': TypeError: Field 'num_experts' expected int",
        ),
        ("layers", "'num_hidden_layers' expected int"),
        ("hidden", "'hidden_size' expected int"),
        ("quantization", "AttributeError: 'int' object has no attribute"),
        ("no weights", "no weights holds no *.safetensors file"),
        ("cut short", "model.safetensors: not a safetensors file, or cut short"),
        ("a file", "config.json is a file; give the checkpoint's folder"),
        ("gguf", f"model.gguf: this is a GGUF file; {NO_GGUF}"),
        ("a folder of gguf", f": this is a folder with GGUF files; {NO_GGUF}"),
        ("draft cut short", "model.safetensors: not a safetensors file, or cut short"),
        ("no number", "--expert-offload-num-resident 'abc': must be auto, or a whole number of experts"),
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
    assert "'abc': must be auto, or a whole number" in said


def test_weights_that_only_sglang_can_read_are_left_to_it(answers):
    code, said = answers["other weights"]
    assert code == 0, said
    assert "ready to serve this launch" in said


def test_weights_that_the_launch_does_not_read_may_be_missing(answers):
    code, said = answers["no weights, dummy"]
    assert code == 0, said


def test_a_launch_without_offloading_is_a_problem(answers):
    code, said = answers["offloading is off"]
    assert code == 1
    assert "--expert-offload-num-resident: not set or -1, so SGLang would serve this launch without offloading" in said


@pytest.mark.parametrize("case", ["unknown flag", "bad choice"])
def test_what_sglang_cannot_parse_ends_with_2_as_in_a_launch(answers, case):
    assert answers[case] == [2, ""]


def test_every_way_to_give_arguments_is_read(answers):
    code, said = answers["yaml"]
    assert code == 0, said
    assert "--expert-offload-num-resident 3 of 16 experts a layer, on one rank" in said


def test_the_whole_launch_is_resolved(answers):
    code, said = answers["ranks and drafts"]
    assert code == 0, said
    assert "--expert-offload-num-resident 4 of 16 experts a layer, on --tp-size 2 --ep-size 2" in said
    assert "--speculative-algorithm EAGLE with the draft layers of" in said


def test_a_cpu_machine_with_a_launch_is_ready(checkpoints: Checkpoints, tmp_path: Path):
    """It runs in the folder of a checkpoint that has code under the names of libraries; none of that code runs."""
    hostile = Hostile(tmp_path / "model")
    shutil.copytree(checkpoints("qwen3_moe"), hostile.folder, dirs_exist_ok=True)
    said = doctor(hostile.folder, "--", "--device", "cpu", "--model-path", ".", "--expert-offload-num-resident", "4")
    assert said.returncode == 0, said.stdout + said.stderr[-2000:]
    assert hostile.ran == []
    for fact in (
        "SGLang has every hook point",
        "--expert-offload-num-resident 4 of 16 experts a layer, on one rank",
        "memory: emulated",
        "--moe-runner-backend auto",
        "host RAM available: ",
    ):
        assert f"  ok       {fact}" in said.stdout
    assert said.stdout.splitlines()[-1] == "ready to serve this launch"


WITHOUT_VLLM = """
import sys
sys.path[:] = [path for path in sys.path if path != {shims!r}]
for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
    del sys.modules[name]
"""
ROTARY = """
import torch
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
RotaryEmbedding(64, 64, 128, 10000, True, torch.float32)
"""


@pytest.mark.parametrize("launched", [False, True])
def test_what_sglang_lacks_on_a_cpu_is_named(checkpoints: Checkpoints, sglang: Nursery, launched: bool):
    """Runs without the harness's stand-in for vllm, from which SGLang imports an operator when it builds a model."""
    launch = ["--", "--device", "cpu", "--model-path", str(checkpoints("qwen3_moe")), "--expert-offload-num-resident", "4"]
    arguments = ["doctor", *(launch if launched else ["--device", "cpu"])]
    command = f"from sglang_uvm_offload.cli.main import main\nraise SystemExit(main({arguments!r}))"
    without = WITHOUT_VLLM.format(shims=str(SHIMS))
    serving, checked = sglang.run(without + ROTARY), sglang.run(without + command)
    assert "No module named 'vllm'" in serving.err
    assert checked.code == 1, checked.err[-2000:]
    (problem,) = [line for line in checked.out.splitlines() if "PROBLEM" in line]
    for words in ("vllm, which is not installed", "SGLANG_USE_CPU_ENGINE=1", "scripts/quickstart.sh"):
        assert words in problem
    assert sglang.run(ROTARY).code == 0


def test_a_launch_without_a_gpu_and_a_device_is_told_the_flag(checkpoints: Checkpoints, tmp_path: Path):
    """Runs without the harness's shims."""
    launch = ("--", "--model-path", str(checkpoints("qwen3_moe")), "--expert-offload-num-resident", "4")
    said = doctor(tmp_path, *launch, PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert said.returncode == 1, said.stdout + said.stderr[-2000:]
    problems = [line for line in said.stdout.splitlines() if "PROBLEM" in line]
    for words in ("serves on a CPU only with --device cpu", "vllm, which is not installed", "No accelerator (CUDA"):
        assert [words in line for line in problems].count(True) == 1, said.stdout


def test_kernels_that_are_not_built_for_cpus_are_a_problem(tmp_path: Path):
    """SGLang reads the variable as it is imported."""
    said = doctor(tmp_path, "--device", "cpu", SGLANG_USE_CPU_ENGINE="1")
    assert said.returncode == 1, said.stdout + said.stderr[-2000:]
    problems = [line for line in said.stdout.splitlines() if "PROBLEM" in line]
    assert len(problems) == 2, said.stdout
    assert "cannot hook this SGLang: [sgl_kernel] CRITICAL: Could not load any common_ops library!" in problems[0]
    assert "SGLANG_USE_CPU_ENGINE=1 needs SGLang's kernels built for CPUs" in problems[1]


def test_without_a_launch_the_machine_is_checked(sglang: Nursery):
    said = doctor_in(sglang, "--device", "cpu")
    assert said.code == 0, said.err[-2000:]
    assert said.out.splitlines()[-1] == "ready to serve with --device cpu"


def test_the_device_of_a_launch_is_the_launchs(sglang: Nursery):
    said = doctor_in(sglang, "--device", "cpu", "--", "--model-path", "m")
    assert (said.code, said.out) == (2, "")
    assert "--device cpu: give it after --" in said.err


def test_every_problem_is_named_at_once(checkpoints: Checkpoints, sglang: Nursery):
    model = str(checkpoints("qwen3_moe"))
    launch = ("--device", "cuda", "--model-path", model, "--expert-offload-num-resident", "40", "--cpu-offload-gb", "2")
    said = doctor_in(sglang, "--", *launch, "--tp-size", "2", SGLANG_PLUGINS="something_else")
    assert said.code == 1
    problems = [line for line in said.out.splitlines() if "PROBLEM" in line]
    for words in (
        "SGLANG_PLUGINS=something_else",
        "NVIDIA driver",
        "--cpu-offload-gb",
        "num-resident 40: the model has 16",
    ):
        assert [words in line for line in problems].count(True) == 1, said.out
    assert said.out.splitlines()[-1] == f"cannot serve this launch: {len(problems)} problem(s)"


ON_A_GPU = ("--device", "cuda", "--sampling-backend", "pytorch", "--grammar-backend", "none")


def test_auto_is_estimated_where_there_is_a_gpu(checkpoints: Checkpoints, sglang: Nursery, sglang_on_standin: Nurseries):
    launch = ("--model-path", str(checkpoints("qwen3_moe")), "--expert-offload-num-resident", "auto", "--log-level", "error")
    said = doctor_in(sglang_on_standin, "--", *ON_A_GPU, *launch)
    assert said.code == 0, said.out + said.err[-2000:]
    assert "  ok       --expert-offload-num-resident auto of 16 experts a layer, on one rank" in said.out
    assert "  ok       estimated: 16 of 16 experts a layer in VRAM, " in said.out
    assert "GPU 0 (sm_90) can keep experts in unified memory" in said.out
    without = doctor_in(sglang, "--", "--device", "cpu", *launch)
    assert without.code == 1
    assert "--expert-offload-num-resident auto: --device cpu has no VRAM to size for" in without.out


def test_each_gpu_of_the_launch_must_exist(checkpoints: Checkpoints, sglang_on_standin: Nurseries):
    launch = ("--model-path", str(checkpoints("qwen3_moe")), "--expert-offload-num-resident", "4", "--tp-size", "2")
    said = doctor_in(sglang_on_standin, "--", *ON_A_GPU, *launch)
    assert said.code == 1, said.out + said.err[-2000:]
    assert "PROBLEM  CUDA device 1 does not exist: the driver shows 1" in said.out


def test_a_gpu_that_cannot_page_is_a_problem(sglang_on_standin: Nurseries):
    said = doctor_in(sglang_on_standin, "--device", "cuda", STANDIN_ATTRIBUTE_89="0")
    assert "concurrentManagedAccess" in said.out, said.out + said.err[-2000:]
    assert "can keep experts in unified memory" not in said.out
    assert said.code == 1


SLOW_MACHINE = """
from pathlib import Path
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.cuda import pci
from sglang_uvm_offload.memory import host_pages
pci.SYSTEM, host_pages.BUDDYINFO = Path({folder!r}), Path({folder!r}, "buddyinfo")
raise SystemExit(main(["doctor", *{arguments!r}]))
"""


def test_what_slows_reads_of_host_memory_is_warned_of(checkpoints: Checkpoints, sglang_on_standin: Nurseries, tmp_path: Path):
    (tmp_path / "buddyinfo").write_text("Node 0, zone Normal 9999 0 0 0 0 0 0 0 0 0 0\n")
    group = tmp_path / "bus/pci/devices/0000:ab:00.0/iommu_group"
    group.mkdir(parents=True)
    (group / "type").write_text("DMA-FQ\n")
    launch = ("--model-path", str(checkpoints("qwen3_moe", expert_size=512)), "--expert-offload-num-resident", "4")
    said = sglang_on_standin.run(SLOW_MACHINE.format(folder=str(tmp_path), arguments=["--", *ON_A_GPU, *launch]))
    assert said.code == 0, said.out + said.err[-2000:]
    assert "WARNING  the IOMMU translates reads of host memory by GPU 0 (its group has type DMA-FQ)" in said.out
    assert "WARNING  only 0.0 MiB of host RAM is free in blocks of 2 MiB, for " in said.out


def test_routing_in_the_kernels_of_blackwell_is_told(checkpoints: Checkpoints, sglang_on_standin: Nurseries):
    launch = ("--model-path", str(checkpoints("qwen3_moe")), "--expert-offload-num-resident", "4")
    first_n = (*launch, "--expert-offload-resident-selection", "first_n")
    said = doctor_in(sglang_on_standin, "--", *ON_A_GPU, *first_n, **BLACKWELL)
    assert said.code == 0, said.out + said.err[-2000:]
    assert (
        "WARNING  --moe-runner-backend flashinfer_trtllm routes most models in its kernel, which leaves no hit rate" in said.out
    )
    assert "estimated: 4 of 16 experts a layer in VRAM, " in said.out
    assert "setting --disable-flashinfer-autotune" in said.out

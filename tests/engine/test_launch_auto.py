"""``--expert-offload-num-resident auto`` as real SGLang resolves it for a GPU, the stand-in's: the ranks decide the number, and
what needs no rank is refused before they start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders import true_shape
from builders.profiles import saved, some
from builders.rooms import VRAM
from checkpoints import Checkpoints
from launches import launched
from nursery import Nurseries

from scripts.harness.server import flags
from sglang_uvm_offload.plan.machine import GIB

N = "--expert-offload-num-resident"
GPU = {
    "device": "cuda",
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_prefill_cuda_graph": True,
}
REPOSITORY = "maker/tiny"
NO_WEIGHTS = " holds no *.safetensors file"
LEAST_FRACTION = 1e-4
"""A share of 16 GiB: less than two residents a layer."""


def in_the_cache(home: Path, repository: str, files: list[Path]) -> None:
    """Put files where a download from the Hugging Face Hub would leave them."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    commit = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "snapshots" / commit)


@pytest.fixture(scope="module")
def launch(
    checkpoints: Checkpoints, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """All cases run in one process, because importing SGLang takes most of the time: ``launch[name]`` is what came out."""
    folder = tmp_path_factory.mktemp("launches")
    model = checkpoints("qwen3_moe", expert_size=512)
    files = list(model.iterdir())
    in_the_cache(folder / "home", REPOSITORY, files)
    in_the_cache(folder / "home", f"{REPOSITORY}-config", [file for file in files if file.suffix == ".json"])
    cut = true_shape.checkpoint("Qwen/Qwen3-30B-A3B", folder / "cut")
    next(cut.glob("model-00002-*")).unlink()
    foreign = saved(folder / "foreign.npz", some())
    given = {
        **{"model_path": model, **GPU, "expert_offload_num_resident": "auto", "expert_offload_headroom_gb": 0.0},
        "mem_fraction_static": 0.5,
    }
    number = {**given, "expert_offload_num_resident": 8}
    cases: dict[str, dict[str, Any]] = {
        "auto": given,
        "slots": {**given, "expert_offload_slots": "auto"},
        "headroom": {**given, "expert_offload_headroom_gb": 2.0},
        "cached": {**given, "model_path": REPOSITORY},
        "not cached": {**given, "model_path": f"{REPOSITORY}-config"},
        "a number not cached": {**number, "model_path": f"{REPOSITORY}-config"},
        "incomplete": {**given, "model_path": cut},
        "a number, incomplete": {**number, "model_path": cut},
        "two GPUs": {**given, "tp_size": 2},
        "too small for any": {**given, "mem_fraction_static": LEAST_FRACTION},
        "a number too large": {**number, "mem_fraction_static": LEAST_FRACTION},
        "headroom of all": {**given, "expert_offload_headroom_gb": 8.0},
        "slots by a foreign profile": {**given, "expert_offload_profile": foreign, "cpu_offload_gb": 2},
        "slots of a number": {**number, "expert_offload_slots": "auto"},
        "no drafts": {**number, "expert_offload_draft_num_resident": 2},
    }
    jobs = {name: {"argv": flags(case), "resolve": True} for name, case in cases.items()}
    return launched(jobs, sglang_on_standin, HF_HOME=str(folder / "home"))


@pytest.mark.parametrize("case", ["auto", "slots", "cached", "too small for any"])
def test_auto_is_left_to_the_ranks(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert launch[case]["flags"]["expert_offload_num_resident"] == "auto"


def test_slots_beside_a_number_may_be_auto(launch):
    assert launch["slots of a number"]["exit"] is None, launch["slots of a number"]["error"]


def test_so_is_whether_a_number_fits(launch):
    assert launch["a number too large"]["exit"] is None, launch["a number too large"]["error"]
    assert launch["a number too large"]["flags"]["expert_offload_num_resident"] == "8"


def test_the_headroom_is_taken_off(launch):
    assert launch["headroom"]["flags"]["mem_fraction_static"] == pytest.approx(0.5 - 2 * GIB / VRAM, abs=1e-9)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("not cached", [NO_WEIGHTS]),
        ("a number not cached", [NO_WEIGHTS]),
        ("incomplete", ["the download is not complete"]),
        ("a number, incomplete", ["the download is not complete"]),
        ("two GPUs", ["  - CUDA device 1 does not exist: the driver shows 1"]),
        ("headroom of all", ["--expert-offload-headroom-gb 8.0: uses up all of --mem-fraction-static 0.5"]),
        ("slots by a foreign profile", ["foreign.npz: is of another model", "--cpu-offload-gb: cannot"]),
        ("no drafts", ["--expert-offload-config draft_num_resident 2: no draft model is loaded", "remove it"]),
    ],
)
def test_what_needs_no_rank_ends_the_launch_with_every_reason(launch, case, parts):
    assert launch[case]["exit"] == 2, launch[case]["error"]
    for part in parts:
        assert part in launch[case]["error"]

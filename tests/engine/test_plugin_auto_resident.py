"""``--expert-offload-num-resident auto`` in real SGLang over the stand-in driver: the number that fits, or why none does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from builders.profiles import saved, some
from builders.rooms import VRAM, fraction
from checkpoints import Checkpoints
from launches import launched
from nursery import Nurseries

from scripts.harness.server import flags
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.routing.profile import RoutedModel
from sglang_uvm_offload.sizing.draft_model import load_draft
from sglang_uvm_offload.sizing.launch import DEFAULT_KV_TOKENS
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.model_files import ModelFiles

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
"""Of 16 GiB: less than two residents a layer, beside little other weights."""


def in_the_cache(home: Path, repository: str, files: list[Path]) -> None:
    """Put files where a download from the Hugging Face Hub would leave them."""
    folder = home / "hub" / f"models--{repository.replace('/', '--')}"
    commit = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder / "snapshots" / commit)


def draft_bytes(folder: Path, tokens: int) -> int:
    """The weights of a draft model and its cache."""
    draft = load_draft(ModelFiles(str(folder)))
    return draft.rank_bytes(1, 1) + tokens * draft.layers * draft.kv.layer_bytes(1, 2)


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", expert_size=512)


@pytest.fixture(scope="module")
def launch(
    model: Path, checkpoints: Checkpoints, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """All cases run in one process, because importing SGLang takes most of the time: ``launch[name]`` is what came out."""
    folder = tmp_path_factory.mktemp("launches")
    wide, drafting = checkpoints("qwen3_moe", dtype="float32"), checkpoints("glm4_moe", expert_size=512)
    files = list(model.iterdir())
    in_the_cache(folder / "home", REPOSITORY, files)
    in_the_cache(folder / "home", f"{REPOSITORY}-config", [file for file in files if file.suffix == ".json"])
    given = {
        **{"model_path": model, **GPU, "expert_offload_num_resident": "auto", "expert_offload_headroom_gb": 0.0},
        **{"max_total_tokens": 4096, "mem_fraction_static": fraction(model, 8, 4096)},
    }
    drafts = {
        **{"speculative_num_steps": 2, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 3},
    }
    bundled = {**given, "model_path": drafting, "max_total_tokens": None, "mem_fraction_static": 0.0145}
    cases: dict[str, dict[str, Any]] = {
        "tokens": given,
        "requests": {
            **{**given, "max_running_requests": 3, "context_length": 1024, "max_total_tokens": None},
            "mem_fraction_static": fraction(model, 8, 3 * 1024),
        },
        "neither": {**given, "max_total_tokens": None, "mem_fraction_static": fraction(model, 8, DEFAULT_KV_TOKENS)},
        "headroom": {
            **{**given, "expert_offload_headroom_gb": 2.0},
            "mem_fraction_static": given["mem_fraction_static"] + 2 * GIB / VRAM,  # type: ignore[operator]
        },
        "everything": {**given, "mem_fraction_static": 0.5},
        "cached": {**given, "model_path": REPOSITORY},
        "without drafts": bundled,
        "with drafts": {**bundled, **drafts, "speculative_algorithm": "NEXTN"},
        "too small": {**given, "mem_fraction_static": fraction(model, 0, 4096) - 1e-5, "cpu_offload_gb": 2},
        "little host RAM": given,
        "not cached": {**given, "model_path": f"{REPOSITORY}-config"},
        "two GPUs": {**given, "tp_size": 2},
        "float32": {**given, "model_path": wide},
        "uncounted": {
            **{**given, "nnodes": 2, "dist_init_addr": "127.0.0.1:1", "moe_dense_tp_size": 1},
        },
        "draft model": {
            **{**given, **drafts, "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": wide},
            "mem_fraction_static": fraction(model, 8, 4096, beside=draft_bytes(wide, 4096)),
        },
        "hierarchical cache": {**given, "enable_hierarchical_cache": True, "hicache_size": 1},
        "little host RAM for the cache": {**given, "enable_hierarchical_cache": True, "hicache_size": 30},
    }
    routed = RoutedModel(model.name, "Qwen3MoeForCausalLM", (0, 1, 2), 16, 2)
    profile = saved(folder / "profile.npz", some(model=routed).with_slot_shares({0.5: 0.25, 1.0: 1.0}))
    foreign = saved(folder / "foreign.npz", some())
    split = {**given, "expert_offload_slots": "auto", "mem_fraction_static": fraction(model, 8, 4096, beside=6 * BLOCK_BYTES)}
    cases |= {
        "slots": split,
        "slots by a profile": {**split, "expert_offload_profile": profile},
        "slots by a foreign profile": {**split, "expert_offload_profile": foreign, "cpu_offload_gb": 2},
        "too many slots": {**given, "expert_offload_slots": 9},
    }
    number = {**given, "expert_offload_num_resident": 8, "max_total_tokens": None}
    cases |= {
        "a number that fits": {**number, "mem_fraction_static": fraction(model, 8, 4096)},
        "a number too large": {**number, "mem_fraction_static": LEAST_FRACTION},
        "a number on a CPU": {
            **{name: number[name] for name in number if name not in GPU},
            "device": "cpu",
            "mem_fraction_static": LEAST_FRACTION,
        },
        "a number with overrides": {
            **{**number, "mem_fraction_static": LEAST_FRACTION},
            "json_model_override_args": '{"num_hidden_layers": 2}',
        },
        "a number beside more": {**number, "mem_fraction_static": LEAST_FRACTION, "moe_dense_tp_size": 1},
        "a number not cached": {**number, "model_path": f"{REPOSITORY}-config"},
        "a number for two GPUs": {**number, "mem_fraction_static": LEAST_FRACTION, "tp_size": 2},
    }
    host_bytes = {"little host RAM": {"host_bytes": 5 * GIB}, "little host RAM for the cache": {"host_bytes": 40 * GIB}}
    jobs = {name: {"argv": flags(case), "resolve": True, **host_bytes.get(name, {})} for name, case in cases.items()}
    return launched(jobs, sglang_on_standin, HF_HOME=str(folder / "home"))


@pytest.mark.parametrize("case", ["tokens", "requests", "neither", "headroom", "cached"])
def test_auto_becomes_the_number_that_fits_beside_the_cache_that_is_asked_for(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert launch[case]["flags"]["expert_offload_num_resident"] == "8"
    assert f"{N} auto: 8 of 16 experts a layer fit in VRAM: 18.0 MiB on a rank" in launch[case]["error"]


@pytest.mark.parametrize(
    ("case", "residents", "slots", "why"),
    [
        ("slots", 5, 4, "50%, the default with 16 experts"),
        ("slots by a profile", 8, 2, "25%, by the profile, for 50% in VRAM"),
    ],
)
def test_slots_take_a_part_of_what_auto_finds_room_for(launch, case, residents, slots, why):
    assert launch[case]["exit"] is None, launch[case]["error"]
    found = launch[case]["flags"]
    assert (found["expert_offload_num_resident"], found["expert_offload_slots"]) == (str(residents), str(slots))
    divided = f"of {residents + slots} rows a layer in VRAM, {slots} are slots and {residents} residents ({why})"
    assert f"--expert-offload-slots: {divided}" in launch[case]["error"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tokens", "KV cache for 4096 tokens on each rank (as --max-total-tokens gives them)"),
        ("requests", "3072 tokens on each rank (for 3 requests of 1024 tokens)"),
        ("neither", "32768 tokens on each rank (for 1 request of 2048 tokens, or more shorter ones; assumed, and changed by "),
        ("neither", "--max-running-requests, --context-length or --max-total-tokens"),
    ],
)
def test_the_log_says_what_the_cache_is_for_and_which_flags_change_it(launch, case, words):
    assert words in launch[case]["error"]


def test_the_headroom_is_taken_off_after_it_was_counted(launch, model):
    assert launch["headroom"]["flags"]["mem_fraction_static"] == pytest.approx(fraction(model, 8, 4096), abs=1e-9)


def test_where_everything_fits_the_log_says_that_offloading_is_not_needed(launch):
    assert launch["everything"]["flags"]["expert_offload_num_resident"] == "16"
    assert "every expert fits in VRAM: offloading is not needed" in launch["everything"]["error"]


def test_drafting_layers_leave_fewer_residents_but_requests_that_nobody_asked_for_do_not(launch):
    plain, drafting = (launch[name]["flags"]["expert_offload_num_resident"] for name in ("without drafts", "with drafts"))
    assert (plain, drafting) == ("16", "8")
    assert "KV cache for 32768 tokens" in launch["with drafts"]["error"], "SGLang sets 48 requests by itself"


def test_a_draft_model_of_its_own_is_counted(launch):
    assert launch["draft model"]["exit"] is None, launch["draft model"]["error"]
    assert launch["draft model"]["flags"]["expert_offload_num_resident"] == "8"


def test_a_hierarchical_cache_for_which_there_is_host_ram_changes_nothing(launch):
    assert launch["hierarchical cache"]["flags"]["expert_offload_num_resident"] == "8"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "too small",
            ["auto: VRAM: with no expert resident", "remedy: GPUs of 24 GiB", "--cpu-offload-gb: cannot"],
        ),
        ("little host RAM", ["auto: host RAM: with 8 of 16 experts", "auto: remedy: host RAM of 6 GiB"]),
        ("not cached", [NO_WEIGHTS]),
        ("two GPUs", ["auto: cannot query free VRAM: there is no CUDA device 1: the driver shows 1"]),
        ("uncounted", ["--nnodes 2", "--moe-dense-tp-size 1"]),
        ("uncounted", ["auto: does not count --moe-dense-tp-size 1; give a number"]),
        ("slots by a foreign profile", ["foreign.npz: is of another model", "--cpu-offload-gb: cannot"]),
        ("too many slots", ["--expert-offload-slots 9: 8 rows a layer fit in VRAM; give at most as many, or auto"]),
        ("little host RAM for the cache", ["of it for the hierarchical cache", "auto: remedy: host RAM of"]),
    ],
)
def test_where_no_number_can_be_found_the_launch_ends_with_every_reason(launch, case, parts):
    assert launch[case]["exit"] == 2, launch[case]["error"]
    for part in parts:
        assert part in launch[case]["error"]


def test_without_the_network_a_model_without_weights_ends_the_launch(launch):
    assert launch["a number not cached"]["exit"] == 2, launch["a number not cached"]["error"]
    assert NO_WEIGHTS in launch["a number not cached"]["error"]


@pytest.mark.parametrize("case", ["a number that fits", "a number on a CPU"])
def test_a_number_that_fits_and_any_number_on_a_cpu_are_served_without_a_word(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert launch[case]["flags"]["expert_offload_num_resident"] == "8"
    assert "VRAM" not in launch[case]["error"]


def test_a_checkpoint_in_float32_is_planned_as_the_float16_that_it_is_loaded_as(launch):
    assert launch["float32"]["exit"] is None, launch["float32"]["error"]
    assert f"{N} auto: " in launch["float32"]["error"]
    assert "not checked" not in launch["float32"]["error"]


def test_a_number_that_cannot_fit_is_refused_with_what_is_short(launch):
    assert launch["a number too large"]["exit"] == 2
    (line,) = [text for text in launch["a number too large"]["error"].splitlines() if N in text]
    assert f"{N} 8: does not fit on GPU 0 (rank 0): at least " in line
    assert "(18.0 MiB for 8 of 16 experts a layer, " in line
    assert "by --mem-fraction-static 0.0001 minus --expert-offload-headroom-gb 0; no number fits" in line


def test_a_number_is_checked_against_the_model_that_overrides_make(launch):
    whole, less = (launch[case]["error"] for case in ("a number too large", "a number with overrides"))
    assert launch["a number with overrides"]["exit"] == 2
    assert "(18.0 MiB for 8 of 16 experts a layer, " in whole
    assert "(12.0 MiB for 8 of 16 experts a layer, " in less


def test_what_a_number_takes_at_least_is_refused_beside_what_nobody_counts(launch):
    assert launch["a number beside more"]["exit"] == 2
    assert f"{N} 8: does not fit on GPU 0" in launch["a number beside more"]["error"]


def test_unified_memory_is_tried_on_every_gpu_of_the_launch(launch):
    case = launch["a number for two GPUs"]
    assert case["exit"] == 2
    assert "  - there is no CUDA device 1: the driver shows 1" in case["error"].splitlines()

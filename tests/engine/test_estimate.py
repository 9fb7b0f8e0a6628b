"""What ``doctor`` expects of a launch on GPUs, by the arguments that SGLang itself resolves for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from arguments import Arguments
from builders.drafts import eagle
from builders.rooms import VRAM, fraction
from builders.shapes import ask_at_once
from checkpoints import Checkpoints

from sglang_uvm_offload.plan.machine import GIB
from sglang_uvm_offload.plugin.launch import estimate, ranks
from sglang_uvm_offload.plugin.launch.estimate import Estimate
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency.budget import ONE_MEMORY

TOKENS = 4096
EXPERT = 768 << 10
LAYERS = 3
DRAFTS = ("--speculative-num-steps", 2, "--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 3)
N = "--expert-offload-num-resident"


FEWER = '{"num_hidden_layers": 2}'
AS_LAUNCHED = {"dtype": "bfloat16", "model_override_args": "{}"}


@pytest.fixture(scope="module")
def drafting(checkpoints: Checkpoints) -> Path:
    return checkpoints("glm4_moe", expert_size=512)


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints, drafting: Path) -> Path:
    made = checkpoints("qwen3_moe", expert_size=512)
    changed = ({"model_override_args": FEWER}, {"quantization": "fp8"})
    asked = [(path, given) for path in (made, drafting) for given in ({}, AS_LAUNCHED)]
    ask_at_once([*asked, *((made, AS_LAUNCHED | given) for given in changed)])
    return made


Estimated = Callable[..., Estimate]


@pytest.fixture
def estimated(model: Path, cuda_arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> Estimated:
    """Estimates a launch on GPUs of ``VRAM`` bytes, which hold 8 experts a layer beside ``TOKENS`` of KV cache, and no more."""
    monkeypatch.setattr(estimate, "get_device_memory_capacity", lambda device: VRAM >> 20)
    monkeypatch.setattr(estimate, "free_by_gpu", lambda of: {rank.gpu: VRAM for rank in of})
    monkeypatch.setattr(ranks, "visible_gpus", lambda: [("NVIDIA H200", VRAM)])
    monkeypatch.setattr(ranks, "kept_link", lambda number: None)

    def of(
        *words: object,
        path: Path = model,
        host: int = 1 << 40,
        room: float | None = None,
        one_memory: bool = False,
        **flags: object,
    ) -> Estimate:
        monkeypatch.setattr(estimate, "host_available", lambda: host)
        monkeypatch.setattr(estimate, "has_one_memory", lambda: one_memory)
        config = parse({"num_resident": "auto", "slots": 0, "headroom_gb": 0.0, "stream_tokens": "inf", **flags})
        assert config is not None
        share = fraction(model, 8, TOKENS) if room is None else room
        shown = ("--max-total-tokens", TOKENS, "--mem-fraction-static", share)
        given = cuda_arguments("--model-path", path, "--device", "cuda", *shown, *words)
        return estimate.estimate(config, given)

    return of


@pytest.mark.parametrize("number", ["auto", 8])
def test_what_fits_is_told_with_its_bytes_and_who_decides(estimated: Estimated, number: object) -> None:
    found = estimated(num_resident=number)
    assert found.doubts == []
    assert found.facts[0].startswith("estimated: 8 of 16 experts a layer in VRAM, 18.0 MiB per rank, plus ")
    assert "of KV cache for 4096 tokens (as --max-total-tokens gives them); 18.0 MiB in host RAM; " in found.facts[0]
    assert found.facts[0].endswith("each rank measures before it decides")
    assert found.offloaded_bytes == LAYERS * 8 * EXPERT
    # ``mem_fraction_static`` is here as the check of a launch leaves it: the headroom counts once.
    assert estimated(num_resident=number, headroom_gb=2.0).facts[0].startswith("estimated: 8 of 16 experts a layer")


def test_offloaded_bytes_are_those_of_all_ranks_of_this_machine(estimated: Estimated) -> None:
    ways = ((), ("--dp-size", 2), ("--pp-size", 3))
    one, replicas, stages = (estimated(*words, num_resident=8, room=0.5).offloaded_bytes for words in ways)
    assert (replicas, stages) == (2 * one, one)


def test_where_everything_fits_offloading_is_not_needed_and_a_number_that_does_not_fit_is_doubted(
    estimated: Estimated, model: Path
) -> None:
    found = estimated(room=0.5)
    assert found.facts[0].startswith("estimated: 16 of 16 experts a layer")
    assert any("offloading is not needed" in fact for fact in found.facts)
    found = estimated(num_resident=12)
    assert found.facts == ["estimated: 12 of 16 experts a layer in VRAM; each rank measures before it decides"]
    demand = f"a KV cache of {TOKENS} tokens (as --max-total-tokens gives them)"
    assert found.doubts == [f"estimated: {N} 12: leaves no room for {demand}; at most 8 residents fit"]
    assert estimated(num_resident=12, room=fraction(model, 8, 0, beside=-(128 << 20))).facts == [], "no rank starts with it"


def test_where_no_number_fits_the_estimate_names_what_would_help(estimated: Estimated, model: Path) -> None:
    found = estimated(room=fraction(model, 0, TOKENS) - 1e-4)
    assert found.doubts[0].startswith(f"estimated: {N} auto: with no expert resident a rank needs ")
    assert any(doubt.startswith("estimated: remedy: GPUs of 24 GiB each") for doubt in found.doubts)


@pytest.mark.parametrize(
    ("words", "host"), [((), (1 << 30) + (16 << 20)), (("--enable-hierarchical-cache", "--hicache-size", 30), 40 * GIB)]
)
def test_host_ram_that_is_short_is_doubted(estimated: Estimated, words: tuple[object, ...], host: int) -> None:
    found = estimated(*words, host=host)
    assert found.doubts[0].startswith(f"estimated: {N} auto: the offloaded experts need 18.0 MiB of host RAM")
    assert ("for hierarchical caches" in found.doubts[0]) == bool(words)
    assert any("remedy: host RAM of " in doubt for doubt in found.doubts)


def test_one_memory_of_gpu_and_host_is_counted_once(estimated: Estimated) -> None:
    """And there all experts fit or none does: an offloaded one takes as much."""
    assert estimated(one_memory=True, host=VRAM, room=0.5).facts[0].startswith("estimated: 16 of 16")
    (doubt,) = estimated(one_memory=True, host=(2 << 30)).doubts
    assert ONE_MEMORY in doubt


def test_what_changes_the_checkpoint_is_estimated_as_it_becomes(estimated: Estimated) -> None:
    ways = ((), ("--json-model-override-args", FEWER), ("--quantization", "fp8"))
    whole, fewer, converted = (estimated(*words, num_resident=0, room=0.5).offloaded_bytes for words in ways)
    assert fewer == whole * 2 // LAYERS
    assert whole // 2 <= converted < whole // 2 + (1 << 21)


def test_a_number_of_redundant_experts_too_is_estimated(estimated: Estimated) -> None:
    found = estimated("--ep-num-redundant-experts", 2, num_resident=18, room=0.5)
    assert found.doubts == []
    assert found.facts[0].startswith("estimated: 16 of 16 experts a layer in VRAM")


def test_drafts_of_the_checkpoint_take_vram_and_those_of_another_are_not_counted(
    estimated: Estimated, drafting: Path, tmp_path: Path
) -> None:
    nextn = ("--speculative-algorithm", "NEXTN", *DRAFTS)
    plain, own, offloaded = (
        estimated(*words, path=drafting, room=fraction(drafting, 8, TOKENS), **flags)
        for words, flags in (((), {}), (nextn, {}), (nextn, {"draft_num_resident": 0}))
    )
    residents = [int(found.facts[0].split()[1]) for found in (plain, own, offloaded)]
    assert residents[1] < residents[2] <= residents[0]
    draft = eagle(tmp_path / "draft", "bfloat16")
    other = estimated("--speculative-algorithm", "EAGLE", *DRAFTS, "--speculative-draft-model-path", draft)
    assert other.facts[0].startswith("estimated: 8 of 16"), "its ranks count it once it is built"


def test_weights_in_another_form_are_estimated_alike(estimated: Estimated, model: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    (bare / "pytorch_model.bin").write_bytes(bytes(20))
    assert estimated(path=bare) == estimated()


def test_a_profile_of_another_model_is_told(estimated: Estimated, tmp_path: Path) -> None:
    (tmp_path / "other.npz").write_bytes(b"other")
    (doubt,) = estimated(profile=str(tmp_path / "other.npz")).doubts
    assert doubt.startswith(f"{N} auto: cannot be estimated: ")
    assert "other.npz" in doubt

"""Residency is decided in the ranks, once the model is built, in real SGLang over the stand-in driver: a number that does not
fit ends the start before a weight is read, and ``auto`` gives way to what takes VRAM after the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from builders.adapters import adapter
from builders.rooms import VRAM, fraction
from checkpoints import Checkpoints
from standin.auto import ONE, N, Served, environment_of_ranks, serve
from standin.engine import run_engine
from standin.run import Standin
from standin.serving import GPU

from scripts.harness.patience import patience
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

MIB = 1 << 20
EXPERTS, LAYERS = 16, 3
CACHE_TOKENS = GPU["max_total_tokens"]
NEXTN: dict[str, Any] = {
    **{"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1},
    "speculative_num_draft_tokens": 3,
}


def test_a_number_that_fits_on_no_rank_ends_the_start_before_a_weight_is_read(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    """A rank has half of the 16 experts in each of three layers: a block of one tensor holds 8, one of the other all of them.
    A thousandth of VRAM holds these two blocks of each layer, and no third."""
    engine = {"model_path": str(checkpoints("qwen3_moe", expert_size=512)), **GPU, **ONE, "tp_size": 2}
    engine |= {"disable_custom_all_reduce": True, "expert_offload_num_resident": 12, "mem_fraction_static": 1e-3}
    folder = tmp_path / "run"
    env = environment_of_ranks(standin, folder)
    with pytest.raises(AssertionError, match="the engine's log ends"):
        run_engine({"engine": engine, "prompts": [], "max_new_tokens": 1}, folder, env, seconds=patience(900))
    log = (folder / "log.txt").read_text()
    (said,) = [line for line in log.splitlines() if f"{N} 12: " in line]
    assert re.search(
        rf"{N} 12: does not fit on GPU [01] \(rank [01]\): 18\.0 MiB for 12 of 16 experts a layer and \d\.\d MiB for the "
        r"smallest KV cache are needed, and 1\d\.\d MiB are left of what --mem-fraction-static and "
        r"--expert-offload-headroom-gb allow; give at most 8, or auto$",
        said,
    )
    assert log.count("expert offloading cannot start") == 1
    assert log.count("Load weight begin") == 2, "both ranks built the model"
    assert "Load weight end" not in log
    assert "checkpoint shards" not in log, "no file was opened"
    assert "Traceback" not in log.partition("expert offloading cannot start")[0]


@pytest.fixture(scope="module")
def drafting(checkpoints: Checkpoints, standin: Standin, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """With ``auto``, on a GPU that has room for the target's experts, but not for those of its draft layer too; and with the
    number that ``auto`` ended with."""
    model, folder = checkpoints("glm4_moe", expert_size=512), tmp_path_factory.mktemp("drafting")
    room: dict[str, Any] = {**NEXTN, "mem_fraction_static": 174 * MIB / VRAM}
    auto = serve(standin, model, folder / "auto", "auto", **room)
    return {"auto": auto, "given": serve(standin, model, folder / "given", int(auto.number), **room)}


def test_the_target_leaves_a_draft_model_its_room(drafting: dict[str, Served]) -> None:
    """The draft layer's experts take 16 MiB: of the two target's layers, a block of each tensor holds 4 or 8 experts."""
    auto = drafting["auto"]
    assert 0 < int(auto.number) < EXPERTS
    assert auto.corrected() == [], "the draft layer was expected to take as much as a layer of the target"
    assert auto.first_number() == int(auto.number)
    assert auto.state["draft_bytes"] == 16 * MIB
    assert auto.state["resident_ids"] == [[*range(int(auto.number)), EXPERTS]] * 2, "the shared expert stays"
    assert auto.state["offloaded_bytes"] > 0


def test_residents_that_auto_chose_serve_as_the_given_ones_do(drafting: dict[str, Served]) -> None:
    auto, given = drafting["auto"], drafting["given"]
    assert given.corrected() == []
    assert (given.number, given.tokens) == (auto.number, auto.tokens)
    same = ("resident_ids", "resident_bytes", "offloaded_bytes", "draft_bytes", "hit_rate", "zero_copy_bytes", "moves", "fault")
    assert {name: given.state[name] for name in same} == {name: auto.state[name] for name in same}


@pytest.mark.works("Launch", "--enable-lora, auto")
@pytest.mark.works("Parallel", "--ep-num-redundant-experts, auto")
def test_auto_counts_the_buffers_of_adapters_and_the_places_of_replicas(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    """SGLang makes the buffers of adapters once the target is loaded."""
    model = checkpoints("qwen3_moe", expert_size=512)
    more: dict[str, Any] = {"enable_lora": True, "lora_paths": [f"fox={adapter(model, tmp_path / 'fox')}"]}
    more |= {"max_lora_rank": 128, "max_loras_per_batch": 4, "ep_num_redundant_experts": 2, "moe_dense_tp_size": 1}
    room = fraction(model, 8, CACHE_TOKENS, beside=6 * BLOCK_BYTES, measured=True)
    served = serve(standin, model, tmp_path / "run", "auto", **more, mem_fraction_static=room)
    assert f"of {EXPERTS + 2} experts a layer fit in VRAM" in served.log
    assert served.corrected() == [(int(served.number), served.first_number())]
    assert 0 < int(served.number) < served.first_number()
    assert served.state["num_experts"] == LAYERS * (EXPERTS + 2)
    assert served.state["resident_ids"] == [[*range(int(served.number))]] * LAYERS


def test_slots_are_placed_once_the_buffers_of_adapters_are_and_take_what_these_leave(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    model = checkpoints("qwen3_moe", expert_size=512)
    more: dict[str, Any] = {"enable_lora": True, "lora_paths": [f"fox={adapter(model, tmp_path / 'fox')}"]}
    more |= {"max_lora_rank": 128, "max_loras_per_batch": 4, "expert_offload_slots": "auto"}
    room = fraction(model, 8, CACHE_TOKENS, beside=6 * BLOCK_BYTES, measured=True)
    served = serve(standin, model, tmp_path / "run", "auto", **more, mem_fraction_static=room)
    told = r"(\d+) residents and (\d+) slots a layer"
    (found,) = re.findall(rf"Expert offload: {told} instead of {told}, measured with", served.log)
    residents, slots, *before = map(int, found)
    assert 0 < residents + slots < sum(before)
    assert (int(served.number), served.state["slots"]["a_layer"]) == (residents, slots)

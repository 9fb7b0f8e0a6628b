"""Lower bounds of a launch: never above what the planner counts, and with every byte that is certain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import Checkpoints

from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.least_memory import LeastMemory
from sglang_uvm_offload.sizing.machine import GIB, preset
from sglang_uvm_offload.sizing.rank_memory import Case

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
NAMES = sorted(path.stem for path in MODELS.glob("*.json"))


def least(path: Path, parallel: Parallel, reserve: Reserve | None = None, page: int = 64, **work: object) -> LeastMemory:
    workload = Workload(4096, **work)  # type: ignore[arg-type]
    return LeastMemory(Case(load(path), preset("8xH20"), workload, parallel, reserve or Reserve(), Assumptions()), page)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [Parallel(), Parallel(tp=8, ep=8), Parallel(tp=2, pp=2), Parallel(tp=8, dp=8, dp_attention=True)]
)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_planner_calls_fitting_is_never_refused(name, parallel):
    """On a GPU of which the plan takes all."""
    found = least(MODELS / f"{name}.json", parallel)
    for num_resident in (0, 1, found.case.model.num_experts // 2, found.case.model.num_experts):
        for stage in range(parallel.pp):
            rank = found.case.rank(stage, num_resident)
            assert found.needed(stage, num_resident) <= rank.used_bytes
            assert found.granted(found.case.machine.vram_bytes, found.case.machine.vram_bytes) >= found.case.budget


@pytest.mark.parametrize("name", NAMES)
def test_no_more_than_small_things_are_left_out(name):
    """Contexts, batches, scales, rounding and the padding of MXFP4: a fifth, and a block of the driver for each tensor."""
    found = least(MODELS / f"{name}.json", Parallel(tp=8, ep=8))
    rank, half = found.case.rank(0, 0), found.case.model.num_experts // 2
    assert found.weights(0) >= 0.8 * (rank.plain_weights - found.case.model.other)
    tensors = sum(found.case.placed[0].values())
    assert found.experts(0, half) > 0.8 * found.case.resident_bytes(0, half) - tensors * BLOCK_BYTES


def test_the_bytes_of_a_checkpoint_by_hand(checkpoints: Checkpoints):
    """Experts of 512 KiB and 256 KiB in three layers: 8 fill 2 blocks of one tensor and 1 of the other."""
    folder = checkpoints("qwen3_moe", expert_size=512)
    found, shape = least(folder, Parallel()), load(folder)
    assert found.experts(0, 8) == 3 * 3 * BLOCK_BYTES
    assert found.experts(0, 7) == 3 * BLOCK_BYTES, "3.5 and 1.75 MiB a layer"
    assert found.weights(0) == shape.total_bytes - shape.expert_bytes - shape.other
    assert found.cache(0) == 64 * 3 * 2 * 2 * 64 * 2


@pytest.mark.parametrize(("page", "tokens"), [(1, 2), (2, 2), (64, 64)])
def test_a_cache_of_two_tokens_in_whole_pages_is_demanded(page, tokens):
    assert least(MODELS / "qwen3-235b-a22b.json", Parallel(tp=8), page=page).tokens == tokens


def test_tensors_of_unknown_division_count_as_divided():
    found = least(MODELS / "qwen3-235b-a22b.json", Parallel(tp=8))
    layers = found.case.model.layers
    strange = replace(layers[0], replicated=layers[0].replicated + (8 << 20), unknown=8 << 20)
    stranger = LeastMemory(replace(found.case, model=replace(found.case.model, layers=(strange, *layers[1:]))), 64)
    assert stranger.weights(0) == found.weights(0) + (1 << 20)
    assert stranger.case.plain_bytes(0) == found.case.plain_bytes(0) + (8 << 20)


def test_drafts_are_whole_in_vram_of_the_last_stage():
    plain, drafting = (least(MODELS / "deepseek-v3.json", Parallel(tp=8), speculative=on) for on in (False, True))
    plain_stages, stages = (least(MODELS / "deepseek-v3.json", Parallel(tp=4, pp=2), speculative=on) for on in (False, True))
    assert stages.weights(0) == plain_stages.weights(0)
    assert stages.weights(1) > plain_stages.weights(1)
    experts = sum(layer.expert_bytes for layer in drafting.case.model.draft_layers) // 8
    assert experts < drafting.weights(0) - plain.weights(0) < 1.25 * experts


def test_drafts_of_which_some_experts_are_offloaded_are_in_vram_with_the_others():
    def weights(number):
        return least(MODELS / "deepseek-v3.json", Parallel(tp=8), speculative=True, draft_num_resident=number).weights(0)

    assert weights(256) - weights(128) == weights(128) - weights(0) > 0
    experts = 256 * 3 * 7168 * 2048 // 8
    assert experts <= weights(None) - weights(0) < 1.01 * experts  # with their scales


def test_sglang_keeps_its_share_of_the_gpu_that_has_least_free():
    reserve = Reserve(0.75, headroom_gb=preset("8xH20").vram_bytes / GIB / 4, image_bytes=7)
    found = least(MODELS / "deepseek-v3.json", Parallel(tp=8), reserve)
    assert found.share == pytest.approx(0.5)
    assert found.granted(80 * GIB, 60 * GIB) == pytest.approx(50 * GIB - 7, abs=2)


def test_the_number_to_give_instead_is_one_that_the_planner_promises():
    found = least(MODELS / "deepseek-v3.json", Parallel(tp=8))
    most = found.most()
    assert most is not None
    larger = replace(found.case, workload=replace(found.case.workload, max_total_tokens=64))
    assert larger.in_vram(most)
    assert not larger.in_vram(most + 1)


def test_stream_buffers_count_where_they_were_asked_for():
    given, free = (least(MODELS / "gpt-oss-120b.json", Parallel(tp=4), Reserve(stream_gb=gib)) for gib in (4, None))
    assert given.case.stream_buffers(0, 20) == 2
    assert free.stream(0, 20) == 0
    assert given.needed(0, 20) - free.needed(0, 20) == given.stream(0, 20)
    assert 0.98 * 2 * given.case.model.layers[0].expert_bytes / 4 < given.stream(0, 20) < given.case.stream_bytes(0, 20)
    assert given.stream(0, 128) == 0, "with every expert resident nothing streams"


def test_the_padding_of_mxfp4_is_left_out():
    found = least(MODELS / "gpt-oss-120b.json", Parallel(tp=4))
    assert found.experts(0, 128) <= found.case.model.expert_bytes // 4 < found.case.resident_bytes(0, 128)

"""What a launch takes beside its weights and its cache: draft models, hierarchical caches, states of linear attention; and
whether its drafts are worth their reads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints

from sglang_uvm_offload.sizing.checkpoint import from_tensors, load
from sglang_uvm_offload.sizing.draft_cost import draft_note
from sglang_uvm_offload.sizing.draft_model import load_draft
from sglang_uvm_offload.sizing.host_need import HICACHE_RESERVE_BYTES
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.launch import DEFAULT_KV_TOKENS, Launch, Uncounted
from sglang_uvm_offload.sizing.linear_state import LinearState
from sglang_uvm_offload.sizing.machine import GIB, preset
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.planner import choose_num_resident, plan, render
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.ranks import shape_problems
from sglang_uvm_offload.sizing.safetensors_header import TensorInfo

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
DEEPSEEK = MODELS / "deepseek-v3.json"


def launch(path: Path, **changes: Any) -> Launch:
    values: dict[str, Any] = {
        **{"parallel": Parallel(), "vram_bytes": 24 * GIB, "free_vram_bytes": 24 * GIB, "host_bytes": 64 * GIB},
        **{"mem_fraction_static": 0.8, "headroom_gb": 1.0, "model_context": 4096, "max_total_tokens": 4096},
    }
    return Launch(ModelFiles(str(path)), **(values | changes))


def case_of(path: Path, parallel: Parallel, **changes: Any) -> Case:
    return Case(load(path), preset("8xH20"), Workload(4096), parallel, Reserve(), Assumptions(), **changes)


# A draft model of its own


def test_a_draft_models_weights_and_cache_are_read_off_its_own_headers(checkpoints: Checkpoints):
    target, draft = checkpoints("glm4_moe"), checkpoints("qwen3_moe")
    shape, small = load(draft), load_draft(ModelFiles(str(draft)))
    assert small.rank_bytes(1, 1) == shape.total_bytes
    plain, drafting = (launch(target, draft=files).case() for files in (None, ModelFiles(str(draft))))
    assert drafting.plain_bytes(0) - plain.plain_bytes(0) == shape.total_bytes
    more = drafting.kv_token_bytes(0) - plain.kv_token_bytes(0)
    layer = max(plain.model.kv.layer_bytes(1, 2), shape.kv.layer_bytes(1, 2))
    assert more == shape.num_layers * layer


def test_ranks_divide_a_draft_models_matrices(checkpoints: Checkpoints):
    small = load_draft(ModelFiles(str(checkpoints("qwen3_moe"))))
    assert small.rank_bytes(2, 2) == -(-small.attention // 2) + -(-small.feed_forward // 2) + small.whole
    assert small.rank_bytes(2, 1) - small.rank_bytes(2, 2) == small.attention - -(-small.attention // 2)
    assert min(small.attention, small.feed_forward, small.whole) > 0


def test_a_draft_model_that_cannot_be_read_is_named(checkpoints: Checkpoints, tmp_path: Path):
    with pytest.raises(Uncounted, match=rf"cannot read {tmp_path}/config.json"):
        launch(checkpoints("glm4_moe"), draft=ModelFiles(str(tmp_path))).case()


# Host RAM of a hierarchical cache


def test_a_hierarchical_cache_takes_host_ram_and_what_sglang_leaves_free_beside_it():
    case = case_of(DEEPSEEK, Parallel(tp=4, dp=2))
    one, two = (replace(case, reserve=Reserve(hicache_bytes=each * GIB)) for each in (1, 2))
    none, once, twice = (each.host(10, after_moves=False) for each in (case, one, two))
    assert twice - once == 8 * GIB, "of each rank"
    assert once - none - 8 * GIB == 10 * GIB, "once: the machine's"


@pytest.mark.sglang
def test_what_is_left_free_beside_hierarchical_caches_is_sglangs():
    from sglang.srt.mem_cache.pool_host import base

    assert HICACHE_RESERVE_BYTES == base.HICACHE_HOST_MEMORY_RESERVE_BYTES


def test_a_ratio_is_to_the_cache_that_fills_what_is_left():
    case = replace(case_of(DEEPSEEK, Parallel(tp=8)), reserve=Reserve(hicache_ratio=2.0))
    spare = case.rank(0, 8).spare_bytes
    assert spare > GIB
    assert case.hicache_bytes(0, 8) == 2 * (case.kv_bytes(0) + spare)
    assert case.hicache_bytes(0, 16) < case.hicache_bytes(0, 8)
    need = case.host_need(8)
    assert need.cache + need.beside_cache == 8 * case.hicache_bytes(0, 8) + HICACHE_RESERVE_BYTES


def test_a_ratio_is_to_the_tokens_that_a_flag_gives():
    case = replace(case_of(DEEPSEEK, Parallel(tp=8)), reserve=Reserve(hicache_ratio=2.0))
    given = replace(case, workload=replace(case.workload, max_total_tokens=case.kv_tokens))
    assert given.hicache_bytes(0, 8) == 2 * given.kv_bytes(0)
    least = replace(given, workload=replace(given.workload, tokens_are_least=True))
    assert least.hicache_bytes(0, 8) == case.hicache_bytes(0, 8)


# DeepEP


def test_shared_experts_that_are_whole_on_every_rank_take_their_bytes_there():
    layers = [layer for layer in load(DEEPSEEK).layers if layer.experts]
    shared = sum(layer.feed_forward for layer in layers)
    split, whole = (case_of(DEEPSEEK, Parallel(tp=8, ep=8, shared_whole=on)).plain_bytes(0) for on in (False, True))
    assert whole - split == shared - sum(-(-layer.feed_forward // 8) for layer in layers)


# Linear attention

LINEAR = {
    **{"num_hidden_layers": 4, "full_attention_interval": 4, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 256},
    **{"moe_intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"max_position_embeddings": 4096},
}


def linear_model() -> Any:
    """Named as Qwen3-Next is, with a draft layer that numbers itself."""
    tensors = [TensorInfo("model.embed_tokens.weight", "BF16", (1000, 256)), TensorInfo("lm_head.weight", "BF16", (1000, 256))]
    for name in (*(f"model.layers.{i}" for i in range(4)), "mtp.layers.0"):
        for expert in range(4):
            parts = ("gate_proj", "up_proj", "down_proj")
            tensors += [TensorInfo(f"{name}.mlp.experts.{expert}.{part}.weight", "BF16", (256, 256)) for part in parts]
        tensors.append(TensorInfo(f"{name}.linear_attn.in_proj_qkvz.weight", "BF16", (1024, 256)))
    return from_tensors("next", LINEAR, [*tensors, TensorInfo("mtp.fc.weight", "BF16", (256, 512))], from_headers=True)


def test_the_layers_of_qwen3_next_are_told_apart():
    shape = linear_model()
    assert shape.kv.state_layers == {0, 1, 2}
    assert [layer.attention for layer in shape.layers] == [1024 * 256 * 2] * 4, "divided by the ranks"
    assert [layer.index for layer in shape.draft_layers] == [4]
    assert shape.other == 0
    assert shape.layers[0].expert_bytes == 4 * 3 * 256 * 256 * 2, "without the draft layer's"


def linear_case(state: LinearState | None, tokens: int, requests: int = 1) -> Case:
    work = Workload(1024, requests, max_total_tokens=tokens)
    return Case(linear_model(), preset("8xH20"), work, Parallel(tp=2), Reserve(), Assumptions(), linear=state)


def test_states_take_their_share_beside_the_cache_and_never_too_little_for_the_requests():
    none, tokens = linear_case(None, 1 << 20), 1 << 20
    pool = none.pool_bytes(0)
    by_ratio = linear_case(LinearState(1 << 20, 0.5), tokens)
    assert by_ratio.kv_bytes(0) - none.kv_bytes(0) == pool // 2
    slot = 3 * (1 << 20) // 2
    many = linear_case(LinearState(1 << 20, 0.5), tokens, requests=100)
    states = (100 * 5 + 1) * slot
    assert states > pool // 2
    assert many.state_bytes(0) == states + max(0, 2 * states - pool)
    assert linear_case(LinearState(1 << 20, 0.5, slots=10), tokens).state_bytes(0) == 11 * slot


def test_states_of_unknown_size_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sglang_uvm_offload.sizing.model_files.load_any", lambda path, dtype, overrides: linear_model())
    with pytest.raises(Uncounted, match="the state of 3 layers with linear attention is not counted"):
        launch(DEEPSEEK).case()
    assert launch(DEEPSEEK, linear=LinearState(1, 0.9)).case().linear is not None


# What drafts cost


def drafts(path: Path, residents: int, requests: int = 1, rates: bool = True, **changes: Any) -> str:
    machine = preset("8xH20") if rates else replace(preset("8xH20"), link_gbps=0, hbm_gbps=0, tflops=0)
    workload = Workload(4096, requests, speculative=True, **changes)
    return draft_note(Case(load(path), machine, workload, Parallel(tp=8), Reserve(), Assumptions()), residents)


def test_at_low_residency_drafts_read_more_for_each_token_than_they_bring():
    note = drafts(DEEPSEEK, 64)
    assert "tokens a second, and" in note
    assert "assumed: 2.5 of 4 verified tokens are kept" in note
    more, fewer = (
        float(part.split(" MB")[0].split()[-1]) for part in note.split(" over the link")[0:1] + note.split(", and ")[2:3]
    )
    assert more > fewer


def test_where_experts_are_resident_drafts_are_worth_their_reads():
    assert drafts(DEEPSEEK, 256) == ""
    assert drafts(DEEPSEEK, 250) == ""


def test_two_of_two_tokens_are_kept_and_cost_no_more_than_alone():
    assert drafts(DEEPSEEK, 64, draft_tokens=2) == ""


def test_without_the_machines_rates_bytes_alone_decide():
    assert "tokens a second" not in drafts(DEEPSEEK, 64, rates=False)
    assert drafts(DEEPSEEK, 64, rates=False)
    assert drafts(DEEPSEEK, 256, rates=False) == ""


def test_a_plan_notes_the_cost_of_drafts_and_only_of_drafts():
    machine, parallel = replace(preset("8xH20"), host_bytes=4096 * GIB), Parallel(tp=8)
    reserve = Reserve(0.3)
    drafting, plain = (plan(load(DEEPSEEK), machine, Workload(4096, speculative=on), parallel, reserve) for on in (True, False))
    assert drafting.draft_note in drafting.notes
    assert "drafts are predicted" in drafting.draft_note
    assert not plain.draft_note


def test_a_plan_says_which_number_of_draft_tokens_is_fastest_where_it_is_served():
    machine, few, most = replace(preset("8xH20"), host_bytes=4096 * GIB), 40, 256
    best = {}
    for residents in (few, most):
        reserve, workload = Reserve(0.95 if residents == most else 0.3), Workload(4096, 2, speculative=True)
        found = plan(load(DEEPSEEK), machine, workload, Parallel(tp=8), reserve, num_resident=residents)
        assert [(speed.requests, speed.drafts) for speed in found.draft_speeds] == [(r, d) for r in (1, 2) for d in range(4)]
        alone = found.draft_speeds[:4]
        assert alone[3].kept == pytest.approx(2.5)
        if residents == few:
            assert all(later.missed_bytes > 1.1 * earlier.missed_bytes for earlier, later in pairwise(alone))
        shares = [later.kept - earlier.kept for earlier, later in pairwise(alone)]
        assert shares[1:] == pytest.approx([shares[0] ** 2, shares[0] ** 3])
        best[residents] = max(alone, key=lambda speed: speed.decode_tokens_s)
        line = f"draft tokens with 1 request: fastest with {best[residents].drafts} a step, given: 3 (predicted tok/s by"
        assert line in render(found)
    assert best[few].drafts < 3 == best[most].drafts
    plain = plan(load(DEEPSEEK), machine, Workload(4096), Parallel(tp=8), Reserve(0.3))
    assert plain.draft_speeds == ()
    assert "draft tokens" not in render(plain)


def test_the_number_given_is_predicted_as_the_plan_predicts_it():
    machine = replace(preset("8xH20"), host_bytes=4096 * GIB)
    given = {"hit_rate": 0.6, "num_resident": 40}
    found = plan(load(DEEPSEEK), machine, Workload(4096, speculative=True), Parallel(tp=8), Reserve(0.3), **given)
    (speed,) = found.speeds
    assert found.draft_speeds[-1].decode_tokens_s == pytest.approx(speed.decode_tokens_s)
    assert found.draft_speeds[-1].missed_bytes == pytest.approx(speed.missed_bytes)


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_of_the_tokens_that_a_launch_verifies_no_more_are_assumed_to_be_kept(tokens: int):
    """EAGLE with one step verifies two tokens."""
    case = launch(DEEPSEEK, speculative=True, draft_tokens=tokens).case()
    assert case.assumed.accepted_tokens == min(2.5, tokens)
    assert shape_problems(case) == []


def test_drafts_without_a_checkpoint_of_their_own_are_weighed_too():
    """Such as n-grams."""
    roomy = {"parallel": Parallel(tp=8), "vram_bytes": 96 * GIB, "free_vram_bytes": 96 * GIB, "host_bytes": 4096 * GIB}
    few = launch(DEEPSEEK, **roomy, mem_fraction_static=0.5)
    assert choose_num_resident(replace(few, draft_tokens=4)).draft_note
    assert not choose_num_resident(few).draft_note


def test_the_page_names_the_cache_that_auto_leaves_room_for():
    page = " ".join((Path(__file__).parents[2] / "docs/flags.md").read_text().split())
    assert f"It leaves room for a KV cache of {DEFAULT_KV_TOKENS:,} tokens" in page

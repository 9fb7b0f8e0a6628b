"""What a launch takes beside its weights and its cache: hierarchical caches, and what its drafts cost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.draft_cost import draft_note
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.planner import plan, render
from sglang_uvm_offload.residency.budget import Division
from sglang_uvm_offload.residency.demand import DEFAULT_KV_TOKENS
from sglang_uvm_offload.residency.host_need import HICACHE_RESERVE_BYTES

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
DEEPSEEK = MODELS / "deepseek-v3.json"


def case_of(path: Path, parallel: Parallel, **changes: Any) -> Case:
    return Case(shape_of(path), preset("8xH20"), Workload(4096), parallel, Reserve(), Assumptions(), **changes)


# Host RAM of a hierarchical cache


def test_a_hierarchical_cache_takes_host_ram_and_what_sglang_leaves_free_beside_it():
    case = case_of(DEEPSEEK, Parallel(tp=4, dp=2))
    one, two = (replace(case, reserve=Reserve(hicache_bytes=each * GIB)) for each in (1, 2))
    none, once, twice = (each.host_need(Division(10, 0, 0)).total for each in (case, one, two))
    assert twice - once == 8 * GIB, "of each rank"
    assert once - none - 8 * GIB == 10 * GIB, "once: the machine's"


@pytest.mark.sglang
def test_what_is_left_free_beside_hierarchical_caches_is_sglangs():
    from sglang.srt.mem_cache.pool_host import base

    assert HICACHE_RESERVE_BYTES == base.HICACHE_HOST_MEMORY_RESERVE_BYTES


def test_a_ratio_is_to_the_cache_that_is_asked_for():
    case = replace(case_of(DEEPSEEK, Parallel(tp=8)), reserve=Reserve(hicache_ratio=2.0))
    need = case.host_need(Division(8, 0, 0))
    assert need.cache + need.beside_cache == 8 * 2 * case.kv_bytes(0) + HICACHE_RESERVE_BYTES


# DeepEP


def test_shared_experts_that_are_whole_on_every_rank_take_their_bytes_there():
    layers = [layer for layer in shape_of(DEEPSEEK).layers if layer.experts]
    shared = sum(layer.feed_forward for layer in layers)
    split, whole = (case_of(DEEPSEEK, Parallel(tp=8, ep=8, shared_whole=on)).plain_bytes[0] for on in (False, True))
    assert whole - split == shared - sum(-(-layer.feed_forward // 8) for layer in layers)


# What drafts cost


def drafts(path: Path, residents: int, requests: int = 1, rates: bool = True, **changes: Any) -> str:
    machine = preset("8xH20") if rates else replace(preset("8xH20"), link_gbps=0, hbm_gbps=0, tflops=0)
    workload = Workload(4096, requests, speculative=True, **changes)
    return draft_note(
        Case(shape_of(path), machine, workload, Parallel(tp=8), Reserve(), Assumptions()), Division(residents, 0, 0)
    )


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
    drafting, plain = (
        plan(shape_of(DEEPSEEK), machine, Workload(4096, speculative=on), parallel, reserve) for on in (True, False)
    )
    assert drafting.draft_note in drafting.notes
    assert "drafts are predicted" in drafting.draft_note
    assert not plain.draft_note


def test_a_plan_says_which_number_of_draft_tokens_is_fastest_where_it_is_served():
    machine, few, most = replace(preset("8xH20"), host_bytes=4096 * GIB), 40, 256
    best = {}
    for residents in (few, most):
        reserve, workload = Reserve(0.95 if residents == most else 0.3), Workload(4096, 2, speculative=True)
        found = plan(shape_of(DEEPSEEK), machine, workload, Parallel(tp=8), reserve, num_resident=residents)
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
    plain = plan(shape_of(DEEPSEEK), machine, Workload(4096), Parallel(tp=8), Reserve(0.3))
    assert plain.draft_speeds == ()
    assert "draft tokens" not in render(plain)


def test_the_number_given_is_predicted_as_the_plan_predicts_it():
    machine = replace(preset("8xH20"), host_bytes=4096 * GIB)
    given = {"hit_rate": 0.6, "num_resident": 40}
    found = plan(shape_of(DEEPSEEK), machine, Workload(4096, speculative=True), Parallel(tp=8), Reserve(0.3), **given)
    (speed,) = found.speeds
    assert found.draft_speeds[-1].decode_tokens_s == pytest.approx(speed.decode_tokens_s)
    assert found.draft_speeds[-1].missed_bytes == pytest.approx(speed.missed_bytes)


def test_drafts_without_a_checkpoint_of_their_own_are_weighed_too():
    """Such as n-grams."""
    machine = replace(preset("8xH20"), host_bytes=4096 * GIB)
    few, drafting = (
        plan(shape_of(DEEPSEEK), machine, Workload(4096, other_drafts=on), Parallel(tp=8), Reserve(0.3)) for on in (False, True)
    )
    assert drafting.draft_note
    assert not few.draft_note


def test_the_page_names_the_cache_that_auto_leaves_room_for():
    page = " ".join((Path(__file__).parents[2] / "docs/flags.md").read_text().split())
    assert f"It leaves room for a KV cache of {DEFAULT_KV_TOKENS:,} tokens" in page

"""A plan warns of drafts that are predicted to cost more than they gain."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from builders.plans import case, machine, planned

from sglang_uvm_offload.plan.draft_cost import draft_note
from sglang_uvm_offload.plan.plan_report import render
from sglang_uvm_offload.plan.routing_curves import hit_rates
from sglang_uvm_offload.residency.budget import Division
from sglang_uvm_offload.residency.demand import DEFAULT_KV_TOKENS
from sglang_uvm_offload.residency.host_need import HICACHE_RESERVE_BYTES
from sglang_uvm_offload.residency.slot_split import Slots


def note(residents: int, slots: int = 0, rates: bool = True, **work: Any) -> str:
    where = machine() if rates else machine(link_gbps=0, hbm_gbps=0, tflops=0)
    asked = case(on=where, given={"slots": Slots(slots)}, **{"requests": 1, "speculative": True, **work})
    return draft_note(asked, Division(residents, slots, 0))


def test_at_low_residency_drafts_cost_more_than_they_gain():
    found = note(64)
    assert "tokens a second, and" in found
    assert "assumed: 2.5 of 4 verified tokens are kept" in found
    more, fewer = (int(each) for each in re.findall(r"(\d+) MB", found))
    assert more > fewer
    assert note(64, draft_tokens=2) == "", "two of two are kept, and cost no more than alone"


@pytest.mark.parametrize("rates", [True, False])
def test_where_experts_are_resident_drafts_are_worth_their_reads(rates):
    """Without the machine's rates bytes alone decide."""
    assert note(256, rates=rates) == ""
    assert bool(note(64, rates=rates))
    assert ("tokens a second" in note(64, rates=rates)) == rates


def test_drafts_are_weighed_with_slots():
    rate = hit_rates("deepseek_v3", 1, 64 / 256, 60 / 64).lowest.rate
    assert rate > 4 / 8, "more than four residents could serve of a token's eight choices"
    assert f"the lowest measured hit rate, {rate:.0%})" in note(4, 60, draft_tokens=10)


@pytest.mark.parametrize("source", ["speculative", "other_drafts"])
def test_a_plan_notes_the_cost_of_drafts_of_the_checkpoint_or_others(source):
    few = {"mem_fraction_static": 0.3}
    drafting, plain = (planned(given=few, requests=1, **{source: on}) for on in (True, False))
    assert "drafts are predicted" in drafting.draft_note
    assert drafting.draft_note in drafting.notes
    assert not plain.draft_note


def test_a_plan_says_which_number_of_draft_tokens_is_fastest():
    """With few residents a further token reads more than it brings."""
    best = {}
    for residents, fraction in ((40, 0.3), (256, 0.95)):
        given = {"mem_fraction_static": fraction, "num_resident": residents}
        found = planned(given=given, requests=2, speculative=True)
        assert [(speed.requests, speed.drafts) for speed in found.draft_speeds] == [(r, d) for r in (1, 2) for d in range(4)]
        best[residents] = max(found.draft_speeds[:4], key=lambda speed: speed.decode_tokens_s).drafts
        line = f"draft tokens with 1 request: fastest with {best[residents]} a step, given: 3 (predicted tok/s by"
        assert line in render(found)
    assert best[40] < 3 == best[256]
    assert planned(requests=1).draft_speeds == ()


def test_the_number_given_is_predicted_as_the_plan_predicts_it():
    given = {"mem_fraction_static": 0.3, "num_resident": 40}
    found = planned(given=given, requests=1, speculative=True, hit_rate=0.6)
    assert found.draft_speeds[-1].decode_tokens_s == pytest.approx(found.speeds[0].decode_tokens_s)


@pytest.mark.sglang
def test_what_is_left_free_beside_hierarchical_caches_is_sglangs():
    from sglang.srt.mem_cache.pool_host import base

    assert HICACHE_RESERVE_BYTES == base.HICACHE_HOST_MEMORY_RESERVE_BYTES


def test_the_page_names_the_cache_that_auto_leaves_room_for():
    page = " ".join((Path(__file__).parents[2] / "docs/flags.md").read_text().split())
    assert f"`auto` leaves room for a KV cache of {DEFAULT_KV_TOKENS:,} tokens" in page

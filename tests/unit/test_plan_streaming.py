"""Stream buffers in a plan: the tokens from which a step streams, the VRAM that the buffers take, and what plans print."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from builders import links
from builders.plans import case, machine, planned

from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.memory.layout import whole_blocks
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel
from sglang_uvm_offload.plan.machine import GIB
from sglang_uvm_offload.plan.planner import render
from sglang_uvm_offload.plan.rates import StreamRates, stream_rates
from sglang_uvm_offload.plan.speed import distinct
from sglang_uvm_offload.plan.streaming import break_even_tokens

BUFFER = 1.3125
"""GiB of a stream buffer of DeepSeek-V3 on one of eight ranks."""


# From how many tokens


@pytest.mark.parametrize(("in_vram", "tokens"), [(0, 1024), (200, 1024), (230, 4096), (240, 8192), (248, 16384), (256, 1024)])
def test_the_more_experts_are_in_vram_the_later_a_step_streams(in_vram, tokens):
    """A step of so many tokens takes longer to read those that are not than the others take to be copied."""
    assert break_even_tokens(256, 8, in_vram, StreamRates(50e9, 50e9, 400e9)) == tokens
    if tokens > 1024:
        ratio = in_vram / 400 / ((256 - in_vram) / 50)
        assert (tokens / 2) * 8 / 256 / 128 + 0.5 < ratio <= tokens * 8 / 256 / 128 + 0.5


def test_rates_of_streams_are_of_the_link_and_vram_or_measured():
    def rates(**changes: Any) -> Any:
        return stream_rates(machine("4x4090", **{"host_gbps": 0.0, **changes}), Parallel(tp=4), Assumptions())

    assert rates(link_gbps=0.0) is None, "of no table, and not measured"
    assert rates(link_gbps=10.0) == pytest.approx((9.4e9, 9.2e9, 1008e9 * 0.7 / 2))
    measured = links.rates(scattered=35.0, copied=50.0)
    assert rates(link_gbps=0.0, hbm_gbps=0.0, measured=measured) == (35e9, 50e9, 920e9), "of unknown VRAM, what all have"


@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens"), [(256, 8, 128), (32, 4, 32), (512, 10, 256), (8, 8, 1), (4, 5, 1), (8, 0, 32)]
)
def test_steps_stream_from_eight_times_the_power_of_two_of_tokens_that_use_nearly_all_experts(num_experts, top_k, tokens):
    assert break_even_tokens(num_experts, top_k) == 8 * tokens
    assert distinct(num_experts, top_k or 1, tokens) >= 0.98 * num_experts
    assert tokens == 1 or distinct(num_experts, top_k or 1, tokens // 2) < 0.98 * num_experts


# Buffers


@pytest.mark.parametrize("parallel", [Parallel(tp=8), Parallel(tp=8, ep=8), Parallel(tp=4, pp=2)])
def test_a_buffer_holds_all_local_experts_of_the_largest_layer_each_tensor_in_whole_blocks(parallel):
    expert = 7168 * 2048 // parallel.moe_tp
    by_hand = sum(whole_blocks(256 // parallel.ep * matrices * expert) for matrices in (2, 1))
    found = case(parallel=parallel)
    assert [found.stream_layer_bytes(stage) for stage in range(parallel.pp)] == [by_hand] * parallel.pp
    layers = list(found.model.layers)
    part = layers[40].experts[0]
    layers[40] = replace(layers[40], experts=(replace(part, nbytes=2 * part.nbytes), *layers[40].experts[1:]))
    larger = replace(found, model=replace(found.model, layers=tuple(layers)))
    sizes = [larger.stream_layer_bytes(stage) for stage in range(parallel.pp)]
    assert [size > by_hand for size in sizes] == [False] * (parallel.pp - 1) + [True]


def test_buffers_take_vram_of_residents_where_they_are_chosen_or_given():
    chosen, given, none = (planned(given={"stream_gb": gib}) for gib in (None, 4, 0))
    assert (chosen.num_resident, chosen.stream_buffers) == (given.num_resident, 2)
    assert none.stream_buffers == 0
    assert none.num_resident > chosen.num_resident
    assert chosen.ranks[0].stream_bytes == 2 * BUFFER * GIB
    beside = planned(given={"num_resident": none.num_resident})
    assert (beside.fits, beside.stream_buffers) == (True, 0)
    (problem,) = planned(given={"num_resident": none.num_resident, "stream_gb": 4}).problems
    assert problem.endswith(f"; at most {given.num_resident} residents fit")


def test_doing_without_the_buffers_that_were_asked_for_is_a_remedy():
    """VRAM is left for two residents, and no buffer."""
    none, tight = {"stream_gb": 0}, case().rank(0, case(given={"num_resident": 2, "stream_gb": 0}).division)
    vram = machine().vram_bytes
    fraction = tight.used_bytes / (vram - case().taken_before_loading) + GIB / vram + 1e-9
    refused = planned(given={"stream_gb": 100, "mem_fraction_static": fraction})
    assert "with no expert resident a rank needs " in refused.problems[0]
    assert refused.needs[0] == "no stream buffers (--expert-offload-config stream_buffer_gb 0)"
    assert planned(given={**none, "mem_fraction_static": fraction}).num_resident == 2


def test_less_than_a_buffer_is_noted():
    flag = "--expert-offload-config stream_buffer_gb 1"
    notes = planned(given={"stream_gb": 1}).notes
    assert f"{flag} is less than one stream buffer, which takes 1.31 GiB: nothing streams" in notes


# What a plan shows


def test_a_plan_streams_by_its_own_buffers_and_its_models_experts():
    two, none = (planned(given={"num_resident": 100, "stream_gb": gib}) for gib in (None, 0))
    short = planned(given={"num_resident": 100}, prompt_tokens=64)
    assert (two.stream_buffers, two.stream_tokens) == (2, 1024)
    assert all(each.streamed for each in two.speeds)
    assert not any(each.streamed for each in (*none.speeds, *short.speeds))
    assert two.speeds[0].prefill_tokens_s > none.speeds[0].prefill_tokens_s
    assert (two.hiding_chunk > 0, none.hiding_chunk) == (True, 0)


def test_a_plan_whose_chunks_would_not_stream_keeps_no_vram_for_it():
    few, most = (planned(given={"num_resident": number, "chunked_prefill_size": 4096}) for number in (200, 248))
    assert (few.stream_buffers, few.stream_tokens, most.stream_buffers, most.stream_tokens) == (2, 1024, 0, 8192)
    told = "copying a layer pays from 8192 tokens on. Chunks of 4096 read offloaded experts in place."
    assert told in render(most)
    for changes, buffers in (({}, 0), ({"chunked_prefill_size": 8192}, 2), ({"stream_tokens": 512}, 2), ({"stream_gb": 4}, 2)):
        given = {"num_resident": 248, "chunked_prefill_size": 4096, **changes}
        assert planned(on="8xH20-141GB", given=given).stream_buffers == buffers


def test_the_report_says_how_prefill_streams_and_which_chunk_hides_it():
    two, one, none = (planned(given={"num_resident": 150, "stream_gb": gib}, requests=1) for gib in (None, 1.5, 0))
    text = render(two, explain=True)
    assert re.search(r"stream buffers +2\.62 GiB", text)
    chunk = f"A chunk of {two.hiding_chunk} to {two.slowest_hiding_chunk} tokens or more hides its stream after the first layer"
    assert 0 < two.hiding_chunk < two.slowest_hiding_chunk
    assert f"streams, through 2 stream buffers. {chunk}" in text
    assert "through 1 stream buffer. " in render(one)
    assert "Without stream buffers, prefill reads offloaded experts in place" in render(none)
    small = replace(two, chunked_prefill_size=two.slowest_hiding_chunk - 1)
    assert f"after the first layer; --chunked-prefill-size is {two.slowest_hiding_chunk - 1}.\n" in render(small)
    assert "--chunked-prefill-size is" not in render(replace(two, chunked_prefill_size=two.slowest_hiding_chunk))
    assert "after the first layer, on a fast link only." in render(replace(two, slowest_hiding_chunk=0))
    assert "No chunk of up to 65536 tokens hides the copying." in render(replace(two, hiding_chunk=0, slowest_hiding_chunk=0))


def test_the_flags_name_buffers_that_were_asked_for_and_no_others():
    for gib in (None, 0, 1.5):
        flags = [each for each in planned(given={"stream_gb": gib}).flags if "stream_buffer_gb" in each]
        assert flags == ([] if gib is None else [config_flag(stream_buffer_gb=gib)])

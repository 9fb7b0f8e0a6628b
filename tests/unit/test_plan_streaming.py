"""Stream buffers in a plan: from how many tokens on a step streams, the VRAM that its buffers take, and how fast prefill is."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from builders import links

from sglang_uvm_offload.cli import plan as planner_cli
from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, whole_blocks
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Plan, Speed
from sglang_uvm_offload.plan.planner import plan, render
from sglang_uvm_offload.plan.rates import StreamRates, stream_rates
from sglang_uvm_offload.plan.speed import distinct, hiding_chunk, predict
from sglang_uvm_offload.plan.stage_cost import IN_PLACE, StageCost, Stream
from sglang_uvm_offload.plan.streaming import break_even_tokens
from sglang_uvm_offload.residency.budget import Division, buffers_in

MODELS = Path(__file__).parents[1] / "fixtures" / "models"
DEEPSEEK = MODELS / "deepseek-v3.json"
MACHINE = replace(preset("8xH20"), host_bytes=4096 * GIB)
TP8 = Parallel(tp=8)


@cache
def model(path: Path) -> ModelShape:
    return shape_of(path)


def case_of(path: Path = DEEPSEEK, parallel: Parallel = TP8, **reserve: float | None) -> Case:
    return Case(model(path), MACHINE, Workload(4096), parallel, Reserve(**reserve), Assumptions())  # type: ignore[arg-type]


def planned(num_resident: int | None = None, prompt: int = 4096, requests: int = 1, **reserve: float | None) -> Plan:
    work = Workload(4096, requests, prompt_tokens=prompt)
    return plan(model(DEEPSEEK), MACHINE, work, TP8, Reserve(**reserve), num_resident=num_resident)  # type: ignore[arg-type]


def test_a_stream_on_a_measured_link_runs_at_the_copy_kernels_rate():
    def chunk(**rates: float) -> float:
        machine = replace(MACHINE, measured=links.rates(**rates))
        (found, *_) = plan(model(DEEPSEEK), machine, Workload(4096), TP8, Reserve(), num_resident=60).speeds
        assert found.streamed
        return found.prefill_chunk_s

    assert chunk(copied=50.0) == chunk(copied=50.0, engine=30.0, scattered=20.0, sequential=25.0) < chunk(copied=40.0)


# From how many tokens


@pytest.mark.parametrize(("in_vram", "tokens"), [(0, 1024), (200, 1024), (230, 4096), (240, 8192), (248, 16384), (256, 1024)])
def test_the_more_experts_are_in_vram_the_later_a_step_streams(in_vram, tokens):
    """A step of so many tokens takes longer to read those that are not than the others take to be copied."""
    rates = StreamRates(50e9, 50e9, 400e9)
    assert break_even_tokens(256, 8, in_vram, rates) == tokens
    if tokens > 1024:
        ratio = in_vram / 400 / ((256 - in_vram) / 50)
        assert (tokens / 2) * 8 / 256 / 128 + 0.5 < ratio <= tokens * 8 / 256 / 128 + 0.5


def test_rates_of_streams_follow_the_link_and_vram():
    """As far as known: a launch without a link in a table or a measurement has none."""
    machine = replace(preset("4x4090"), host_gbps=0.0)

    def rates(**changes: Any) -> StreamRates | None:
        return stream_rates(replace(machine, **changes), Parallel(tp=4), Assumptions())

    slow, fast, unknown = rates(link_gbps=10.0), rates(link_gbps=20.0), rates(link_gbps=0.0)
    assert slow is not None
    assert fast is not None
    assert unknown is None
    assert (fast.read, fast.copied, fast.in_vram) == (2 * slow.read, 2 * slow.copied, slow.in_vram)
    assert 0 < slow.read < 10e9
    narrow = rates(hbm_gbps=100.0)
    assert narrow is not None
    assert 0 < narrow.in_vram < 50e9, "read and written"
    measured = rates(link_gbps=0.0, hbm_gbps=0.0, measured=links.rates(scattered=35.0, copied=50.0))
    assert measured is not None
    assert (measured.read, measured.copied) == (35e9, 50e9)
    assert measured.in_vram > 50e9, "of unknown VRAM, what all have"


@pytest.mark.parametrize(
    ("num_experts", "top_k", "tokens"),
    [(256, 8, 128), (128, 8, 64), (32, 4, 32), (8, 2, 16), (384, 8, 256), (512, 10, 256), (8, 8, 1), (4, 5, 1), (8, 0, 32)],
)
def test_steps_stream_from_eight_times_the_power_of_two_of_tokens_that_use_nearly_all_experts(num_experts, top_k, tokens):
    assert break_even_tokens(num_experts, top_k) == 8 * tokens
    assert distinct(num_experts, top_k or 1, tokens) >= 0.98 * num_experts
    assert tokens == 1 or distinct(num_experts, top_k or 1, tokens // 2) < 0.98 * num_experts


# Bytes


@pytest.mark.parametrize(
    ("gib", "layer_bytes", "buffers"),
    [(0, GIB, 0), (0.99, GIB, 0), (1, GIB, 1), (1.99, GIB, 1), (2, GIB, 2), (100, GIB, 2), (1, 0, 0), (0, 0, 0)],
)
def test_as_many_whole_buffers_as_fit_and_at_most_two(gib, layer_bytes, buffers):
    assert buffers_in(gib, layer_bytes) == buffers


@pytest.mark.parametrize("parallel", [TP8, Parallel(tp=8, ep=8), Parallel(tp=4, pp=2)])
def test_a_buffer_holds_all_local_experts_of_the_largest_layer_each_tensor_in_whole_blocks(parallel):
    expert = 7168 * 2048 // parallel.moe_tp
    by_hand = sum(whole_blocks(256 // parallel.ep * matrices * expert) for matrices in (2, 1))
    case = case_of(parallel=parallel)
    assert [case.stream_layer_bytes(stage) for stage in range(parallel.pp)] == [by_hand] * parallel.pp


def test_the_largest_layer_of_a_stage_decides():
    case = case_of(parallel=Parallel(tp=4, pp=2))
    layers = list(case.model.layers)
    part = layers[40].experts[0]
    layers[40] = replace(layers[40], experts=(replace(part, nbytes=2 * part.nbytes), *layers[40].experts[1:]))
    larger = replace(case, model=replace(case.model, layers=tuple(layers)))
    assert larger.stream_layer_bytes(0) == case.stream_layer_bytes(0)
    assert larger.stream_layer_bytes(1) > case.stream_layer_bytes(1)


def decided(case: Case, num_resident: int | None = None) -> Division:
    return replace(case, num_resident=num_resident).division


def test_buffers_that_are_asked_for_take_vram_of_every_rank():
    none, two = (case_of(stream_gb=gib, mem_fraction_static=0.6) for gib in (0, 100))
    assert decided(none, 100) == Division(100, 0, 0)
    assert decided(two, 100) == Division(100, 0, 2)
    less, more = (case.rank(0, decided(case, 100)) for case in (none, two))
    assert more.stream_bytes == 2 * case_of().stream_layer_bytes(0)
    assert more.used_bytes - less.used_bytes == more.stream_bytes
    one = case_of(stream_gb=1.5 * case_of().stream_layer_bytes(0) / GIB, mem_fraction_static=0.6)
    assert decided(one, 100).buffers == 1


def spacious(num_resident: int, buffers: int, beside: int = 0) -> Case:
    """A budget for so many residents, so many buffers and ``beside`` bytes."""
    case = case_of()
    rank = case.rank(0, Division(num_resident, 0, buffers))
    vram = MACHINE.vram_bytes
    fraction = (rank.used_bytes + beside) / (vram - case.taken_before_loading) + GIB / vram
    return replace(case, reserve=Reserve(fraction + 1e-9))


@pytest.mark.parametrize("buffers", [0, 1, 2])
def test_a_given_number_of_residents_leaves_room_for_as_many_buffers_as_fit(buffers):
    assert decided(spacious(100, buffers), 100).buffers == buffers
    less = spacious(100, buffers, beside=-BLOCK_BYTES)
    if buffers:
        assert decided(less, 100).buffers == buffers - 1
    else:
        assert not replace(less, num_resident=100).fits


def test_buffers_that_are_asked_for_can_make_a_number_not_fit_and_others_cannot():
    most = planned(stream_gb=0).num_resident
    assert most is not None
    assert planned(most).fits
    assert planned(most).stream_buffers == 0
    (problem,) = planned(most, stream_gb=4).problems
    assert problem.endswith(f"; at most {planned(stream_gb=4).num_resident} residents do")


def test_two_buffers_come_before_residents():
    chosen, given, none = planned(), planned(stream_gb=4), planned(stream_gb=0)
    assert (chosen.num_resident, chosen.stream_buffers) == (given.num_resident, 2)
    assert none.stream_buffers == 0
    assert (none.num_resident or 0) > (chosen.num_resident or 0)


@pytest.mark.parametrize(
    ("residents", "buffers", "beside", "chosen"),
    [
        (16, 2, 0, (16, 2)),
        (16, 2, -BLOCK_BYTES, (20, 1)),
        (16, 1, 0, (16, 1)),
        (16, 1, -BLOCK_BYTES, (20, 0)),
        (3, 0, 0, (3, 0)),
    ],
)
def test_fewer_buffers_are_chosen_where_two_would_leave_less_than_twice_the_experts_of_a_token(
    residents, buffers, beside, chosen
):
    assert decided(spacious(residents, buffers, beside)) == Division(chosen[0], 0, chosen[1])


def test_fewer_buffers_are_chosen_where_host_ram_holds_too_few_experts_beside_two():
    two = spacious(100, 2)
    most = decided(replace(two, reserve=replace(two.reserve, stream_gb=0)))
    short = replace(two, machine=replace(MACHINE, host_bytes=two.host_need(most).total))
    assert decided(two) == Division(100, 0, 2)
    assert decided(short) == most


def test_a_model_that_fits_whole_has_no_buffers():
    found = plan(shape_of(MODELS / "gpt-oss-120b.json"), preset("1xH200"), Workload(4096), Parallel())
    assert (found.num_resident, found.stream_buffers, found.ranks[0].stream_bytes) == (128, 0, 0)
    assert "stream buffer," not in render(found)
    assert "in place" not in render(found)


def test_all_experts_fit_where_all_but_one_do_not_fit_beside_buffers():
    case = replace(spacious(256, 0), reserve=replace(spacious(256, 0).reserve, stream_gb=100))
    assert decided(case) == Division(256, 0, 0)
    assert not replace(case, num_resident=255).fits


def test_doing_without_the_buffers_that_were_asked_for_is_a_remedy():
    tight = spacious(2, 0).reserve
    refused = planned(stream_gb=100, mem_fraction_static=tight.mem_fraction_static)
    assert "with no expert resident a rank needs " in refused.problems[0]
    assert refused.needs[0] == "no stream buffers (--expert-offload-config stream_buffer_gb 0)"
    assert planned(stream_gb=0, mem_fraction_static=tight.mem_fraction_static).num_resident == 2


def test_less_than_a_buffer_is_noted():
    (note,) = [note for note in planned(stream_gb=1).notes if "buffer" in note]
    assert (
        note
        == "--expert-offload-config stream_buffer_gb 1 is less than one stream buffer, which takes 1.31 GiB: nothing streams"
    )


# Speed

STAGE = StageCost(10, 10**9, 2e9, (10**7,) * 8, 2e7, 10**6)
"""Two of ten layers are dense."""


ASSUMED = Assumptions()


def speed(
    stream: Stream = IN_PLACE,
    resident: int = 32,
    prompt: int = 4096,
    stage: StageCost = STAGE,
    ep: int = 1,
    assumed: Assumptions = ASSUMED,
) -> Speed:
    rest = (preset("1xH200"), Workload(4096, prompt_tokens=prompt), Parallel(ep, ep), 1, 4096, assumed)
    return predict("test", 0.5, resident, 64, 4, [stage], *rest, stream)


def copying(offloaded: int) -> float:
    """Seconds for the offloaded experts of one layer."""
    return offloaded * 10**7 / (55e9 * Assumptions().copy_efficiency)


def in_vram(resident: int) -> float:
    """Seconds for the resident experts of one layer."""
    return resident * 10**7 / (Assumptions().vram_copy_gbps * 1e9)


def lost(offloaded: int) -> float:
    """Seconds that a layer computes for longer beside a copy."""
    return Assumptions().copy_slows * copying(offloaded) + Assumptions().vram_copy_slows * in_vram(64 - offloaded)


def computing(tokens: int, stage: StageCost = STAGE) -> float:
    """Seconds of a long chunk with all experts in VRAM."""
    overhead = stage.layers * Assumptions().layer_overhead_us * 1e-6
    flops = tokens * (stage.dense_flops + 4 * len(stage.expert_layers) * stage.expert_flops)
    return flops / (989e12 * Assumptions().compute_efficiency) + overhead


def test_a_streamed_chunk_copies_each_offloaded_expert_once_beside_computing():
    """The link takes longer than computing: it is idle while the last of the eight MoE layers computes its experts."""
    stage = replace(STAGE, dense_flops=1.5e9)
    found = speed(Stream(2, 128), stage=stage)
    experts = (computing(4096, stage) - computing(4096, replace(stage, expert_layers=()))) / 8
    assert (found.streamed, found.reread) == (True, 1)
    assert found.prefill_chunk_s == pytest.approx(8 * copying(32) + experts)
    assert found.prefill_chunk_s < speed().prefill_chunk_s
    assert speed(Stream(2, 128), ep=2).prefill_chunk_s < 0.6 * found.prefill_chunk_s, "each rank copies its own"


def test_with_most_experts_resident_vram_takes_longer_than_the_link():
    stage, quick = replace(STAGE, dense_flops=1e8, expert_flops=1e6), replace(Assumptions(), prefill_layer_ms=0.1)
    found = speed(Stream(2, 128), resident=62, stage=stage, assumed=quick).prefill_chunk_s
    assert 8 * copying(2) < 8 * in_vram(62) < found < 1.2 * 8 * in_vram(62)


def test_a_chunk_that_computes_for_longer_hides_its_stream_but_for_what_the_copies_take_from_it():
    slow = replace(STAGE, expert_flops=2e9, dense_flops=2e10)
    found = speed(Stream(2, 128), stage=slow)
    assert found.prefill_chunk_s == pytest.approx(computing(4096, slow) + 8 * lost(32))
    assert found.prefill_tokens_s < found.resident_prefill_tokens_s


@pytest.mark.parametrize("dense", [0, 1])
def test_the_copy_for_a_chunks_first_experts_is_waited_for_beyond_the_layers_before_them(dense):
    slow = replace(STAGE, layers=8 + dense, expert_flops=2e9, dense_flops=2e8)
    before = (dense + 1) * computing(4096, replace(slow, expert_layers=())) / slow.layers
    assert before < copying(32)
    assert hiding(Stream(2, 4096), stage=slow) == 4096, "later layers wait for no copy"
    assert speed(Stream(2, 128), stage=slow).prefill_chunk_s == pytest.approx(
        computing(4096, slow) + copying(32) - before + 7 * lost(32)
    )


def test_one_buffer_is_filled_only_between_the_experts_of_two_layers():
    slow = replace(STAGE, expert_flops=2e9, dense_flops=1.5e9)
    between = computing(4096, replace(slow, expert_layers=())) / 10
    assert between < copying(32)
    found = speed(Stream(1, 128), stage=slow).prefill_chunk_s
    first = copying(32) - 3 * between
    assert found == pytest.approx(computing(4096, slow) + first + 7 * (copying(32) - between))
    assert found > speed(Stream(2, 128), stage=slow).prefill_chunk_s


@pytest.mark.parametrize(
    ("stream", "resident"), [(Stream(0, 1), 32), (Stream(2, 4097), 32), (Stream(2, 1), 64), (IN_PLACE, 32)]
)
def test_prefill_reads_in_place_without_buffers_with_few_tokens_and_with_every_expert_resident(stream, resident):
    found = speed(stream, resident)
    assert found == speed(resident=resident)
    assert not found.streamed


def test_decoding_is_not_streamed():
    assert speed(Stream(2, 1)).decode_step_s == speed().decode_step_s


def hiding(stream: Stream, resident: int = 32, stage: StageCost = STAGE) -> int:
    return hiding_chunk(resident, 64, 4, [stage], preset("1xH200"), Parallel(), Assumptions(), stream)


def test_the_chunk_that_hides_its_stream_is_the_smallest_that_computes_for_as_long_as_it_copies():
    stage = replace(STAGE, layers=8, dense_flops=2e9, expert_flops=2e8)
    chunk = hiding(Stream(2, 128), stage=stage)
    assert chunk % 256 == 0
    assert computing(chunk, stage) >= 8 * copying(32) > computing(chunk - 256, stage)
    assert hiding(Stream(2, 128), 48, stage) < chunk < hiding(Stream(1, 128), stage=stage)
    assert hiding(Stream(2, chunk + 1), stage=stage) == chunk + 256, "smaller ones do not stream"
    assert hiding(Stream(2, 128), stage=replace(stage, expert_flops=2e3, dense_flops=2e5)) == 0
    assert hiding(IN_PLACE) == 0


# What a plan shows


def test_a_plan_streams_by_its_own_buffers_and_its_models_experts():
    two, none, short = planned(100), planned(100, stream_gb=0), planned(100, prompt=64)
    assert (two.stream_buffers, two.stream_tokens) == (2, 1024)
    assert all(each.streamed for each in two.speeds)
    assert not any(each.streamed for each in (*none.speeds, *short.speeds))
    assert two.speeds[0].prefill_tokens_s > none.speeds[0].prefill_tokens_s
    assert (two.hiding_chunk > 0, none.hiding_chunk) == (True, 0)


def test_a_plan_whose_chunks_would_not_stream_keeps_no_vram_for_it():
    few, most = (planned(residents, chunked_prefill_size=4096) for residents in (200, 248))
    assert (few.stream_buffers, few.stream_tokens, most.stream_buffers, most.stream_tokens) == (2, 1024, 0, 8192)
    text = render(most)
    assert (
        "copying a layer pays from 8192 tokens on. Chunks of 4096 read offloaded experts in place, and no VRAM is kept" in text
    )
    roomy, work = replace(preset("8xH20-141GB"), host_bytes=4096 * GIB), Workload(4096)
    for reserve, buffers in (({}, 0), ({"chunked_prefill_size": 8192}, 2), ({"stream_tokens": 512}, 2), ({"stream_gb": 4}, 2)):
        given = Reserve(**{"chunked_prefill_size": 4096} | reserve)  # type: ignore[arg-type]
        assert plan(model(DEEPSEEK), roomy, work, TP8, given, num_resident=248).stream_buffers == buffers


def test_a_choice_that_would_not_stream_takes_the_vram_of_the_buffers():
    case = spacious(246, 2)
    case = replace(case, reserve=replace(case.reserve, chunked_prefill_size=2048))
    found = decided(case)
    assert found.buffers == 0
    assert found.num_resident > 246


def test_the_report_says_how_prefill_streams_and_which_chunk_hides_it():
    two, one, none = (planned(150, stream_gb=gib) for gib in (None, 1.5, 0))
    text = render(two)
    assert re.search(r"stream buffers +2\.62 GiB", text)
    chunk = f"A chunk of {two.hiding_chunk} to {two.slowest_hiding_chunk} tokens or more hides its stream after the first layer"
    assert 0 < two.hiding_chunk < two.slowest_hiding_chunk
    assert f"streams, through 2 stream buffers. {chunk}" in text
    assert "through 1 stream buffer. " in render(one)
    assert "Without stream buffers, prefill reads offloaded experts in place" in render(none)
    assert "reads of an offloaded expert" not in text
    assert "it is copied once" in text
    assert "it is read for each block of 128 rows" in render(none)
    small = replace(two, chunked_prefill_size=two.slowest_hiding_chunk - 1)
    assert f"after the first layer; --chunked-prefill-size is {two.slowest_hiding_chunk - 1}.\n" in render(small)
    assert "--chunked-prefill-size is" not in render(replace(two, chunked_prefill_size=two.slowest_hiding_chunk))
    assert "after the first layer, on a fast link only." in render(replace(two, slowest_hiding_chunk=0))
    assert "No chunk of up to 65536 tokens hides the copying." in render(replace(two, hiding_chunk=0, slowest_hiding_chunk=0))


def test_the_flags_name_buffers_that_were_asked_for_and_no_others():
    assert config_flag(stream_buffer_gb=1.5) in planned(stream_gb=1.5).flags
    assert config_flag(stream_buffer_gb=0) in planned(stream_gb=0).flags
    assert not any("stream_buffer_gb" in each for each in planned().flags)


def test_the_command_plans_with_and_without_buffers(capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    planner_cli.add_arguments(parser)
    buffers = {}
    for words in ((), ("--stream-buffer-gb", "auto"), ("--stream-buffer-gb", "0"), ("--stream-buffer-gb", "1.5")):
        assert planner_cli.run(parser.parse_args([str(DEEPSEEK), "--machine", "8xH20", "--json", *words])) == 0
        buffers[words] = json.loads(capsys.readouterr().out)["ranks"][0]["stream_buffers"]
    assert list(buffers.values()) == [2, 2, 0, 1]

"""How fast steps and prompts are predicted to be, by hand: 10 layers, 64 experts of 10 MB, of which a token uses 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import links
from builders.plans import case, model, planned

from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Workload
from sglang_uvm_offload.plan.machine import preset
from sglang_uvm_offload.plan.outcome import Speed
from sglang_uvm_offload.plan.speed import SpeedModel, distinct
from sglang_uvm_offload.plan.stage_cost import IN_PLACE, StageCost, Stream

EXPERT = 10**7
STAGE = StageCost(10, 10**9, 2e9, (EXPERT,) * 10, 2e7, 10**6)
DRAFTING = replace(STAGE, draft_layers=1, draft_bytes=10**8, draft_expert_bytes=EXPERT)
ASSUMED = Assumptions()
READ, COPY, VRAM = 55e9 * ASSUMED.read_efficiency, 55e9 * ASSUMED.copy_efficiency, 4800e9 * ASSUMED.hbm_efficiency
OVERHEAD = ASSUMED.layer_overhead_us * 1e-6


def speed(
    resident: int = 32,
    hit_rate: float = 0.5,
    requests: int = 1,
    stage: StageCost = STAGE,
    stream: Stream = IN_PLACE,
    slots: int = 0,
    parallel: Parallel | None = None,
    assumed: Assumptions = ASSUMED,
    chunk: int = 4096,
    machine: dict[str, Any] | None = None,
    **work: Any,
) -> Speed:
    where = replace(preset("1xH200"), **(machine or {}))
    of = SpeedModel(64, 4, [stage], where, parallel or Parallel(), assumed)
    return of.predict("test", hit_rate, resident, Workload(4096, **work), requests, chunk, stream, slots)


# Distinct experts


def test_uneven_choices_activate_as_a_beta_distribution_has_it():
    rng, skew, experts, choices = np.random.default_rng(0), 0.4, 100, 4.0
    likely = rng.beta(1 / skew, (experts / choices - 1) / skew, 200_000)
    for tokens in (1, 4, 16, 64):
        simulated = experts * (1 - (1 - likely) ** tokens).mean()
        assert distinct(experts, choices, tokens, skew) == pytest.approx(simulated, rel=5e-3)
    assert distinct(experts, choices, 64, skew) < 0.92 * distinct(experts, choices, 64)
    assert distinct(0, 4, 10) == distinct(8, 0, 5, skew) == 0
    assert distinct(8, 8, 1) == distinct(8, 20, 5, skew) == 8


# Decoding


def test_one_request_misses_its_uncovered_choices_in_every_layer():
    one, missed = speed(), 10 * 2 * EXPERT
    assert one.missed_bytes == pytest.approx(missed)
    assert one.decode_step_s - one.resident_step_s == pytest.approx(missed / READ - missed / VRAM, rel=1e-6)


def test_a_step_reads_every_weight_beside_experts_but_the_embedding_and_draft_experts():
    qwen = case("qwen3-235b-a22b")
    (cost,) = qwen.costs
    assert cost.dense_bytes == qwen.plain_bytes[0] - 151936 * 4096 * 2 // 8
    assert cost.expert_layers == (3 * 4096 * 1536 * 2 // 8,) * 94
    assert cost.expert_flops == 2 * 3 * 4096 * 1536 / 8
    assert (cost.latent_attention, cost.gemm_rate) == (False, 1.0)
    drafting = case(speculative=True)
    (cost,), (draft,) = drafting.costs, model().draft_layers
    beside, head = (draft.attention + draft.feed_forward) // 8 + draft.replicated, 129280 * 7168 * 2 // 8
    assert cost.dense_bytes == drafting.plain_bytes[0] - head - 256 * 3 * 7168 * 2048 // 8 - beside
    assert cost.draft_bytes == beside + head, "the draft layer, and the head for each drafted token"
    assert (cost.draft_layers, cost.draft_expert_bytes) == (1, sum(n for n, _ in drafting.expert_tensors(draft)))
    assert (cost.latent_attention, cost.gemm_rate) == (True, 2.0)


def test_what_is_slower_makes_a_step_longer():
    assert speed(machine={"link_gbps": 110}).decode_step_s < speed().decode_step_s
    assert speed(machine={"hbm_gbps": 1000}).resident_step_s > speed().resident_step_s
    assert speed(machine={"tflops": 10}).resident_prefill_tokens_s < speed().resident_prefill_tokens_s
    latent = speed(64, 1.0, stage=replace(STAGE, latent_attention=True))
    more = (ASSUMED.latent_overhead_us - ASSUMED.layer_overhead_us) * 1e-6
    assert latent.decode_step_s - speed(64, 1.0).decode_step_s == pytest.approx(10 * more)
    fast = speed(64, 1.0, stage=replace(STAGE, gemm_rate=2.0))
    computing = 4096 * (2e9 + 4 * 10 * 2e7) / (989e12 * ASSUMED.compute_efficiency)
    assert speed(64, 1.0).prefill_chunk_s - fast.prefill_chunk_s == pytest.approx(computing / 2)


def test_more_residents_or_hit_rate_never_decode_slower():
    by_residents = [speed(n, n / 64).decode_step_s for n in range(65)]
    by_hit_rate = [speed(hit_rate=rate).decode_step_s for rate in np.linspace(0, 1, 11)]
    for steps in (by_residents, by_hit_rate):
        assert steps == sorted(steps, reverse=True)
    assert by_residents[-1] == speed(64).resident_step_s
    assert (speed(2, 0.9).hit_rate, speed(0, 0.9).hit_rate) == (0.5, 0), "each serves one choice of a token at most"


def test_requests_and_ranks_share_the_experts_that_they_read():
    one, eight = speed(), speed(requests=8)
    assert one.missed_bytes < eight.missed_bytes < 8 * one.missed_bytes
    assert eight.decode_tokens_s > one.decode_tokens_s
    whole = Parallel(tp=4, ep=4)
    assert speed(parallel=whole).missed_bytes == pytest.approx(one.missed_bytes / 4)
    assert speed(parallel=whole).resident_step_s < speed(parallel=Parallel(tp=4)).resident_step_s


def test_verifying_drafts_activates_more_experts_and_yields_more_tokens():
    drafted = speed(speculative=True, draft_tokens=4)
    assert drafted.decode_tokens_s == pytest.approx(2.5 / drafted.decode_step_s)
    independent = distinct(32, 4 * 0.5, 1 + 3 * ASSUMED.draft_token_weight, ASSUMED.expert_skew)
    assert drafted.missed_bytes == pytest.approx(10 * EXPERT * independent)
    assert drafted.missed_bytes < speed(requests=4).missed_bytes, "tokens of one request share experts"


def test_each_drafted_token_takes_a_pass_of_the_draft_layers():
    def step(drafts: int, of: StageCost = DRAFTING) -> float:
        assumed = replace(ASSUMED, draft_token_weight=0.0)
        return speed(64, 1.0, stage=of, assumed=assumed, speculative=drafts > 0, draft_tokens=drafts + 1).decode_step_s

    one = (10**8 + 4 * EXPERT) / VRAM + OVERHEAD
    assert step(3) - step(0) == pytest.approx(3 * one)
    assert step(3, STAGE) == pytest.approx(step(0)), "without draft layers, only more rows are computed"


def test_drafted_tokens_read_what_is_offloaded_of_draft_layers():
    some = replace(DRAFTING, draft_residents=32, draft_hit_rate=0.75)
    whole, part = (speed(64, 1.0, stage=of, speculative=True) for of in (DRAFTING, some))
    assert part.missed_bytes - whole.missed_bytes == pytest.approx(3 * EXPERT, rel=0.02), "a fourth of the four, three times"
    assert part.decode_step_s > whole.decode_step_s
    assert part.resident_step_s == whole.resident_step_s


def test_a_miss_that_fills_a_slot_crosses_the_link_once_and_is_then_read_from_vram():
    filled, in_place = speed(16, slots=16), speed(32)
    assert (filled.hit_rate, filled.missed_bytes) == (in_place.hit_rate, in_place.missed_bytes)
    missed = 20 * EXPERT
    more = missed / COPY - missed / READ + missed / VRAM + 10 * ASSUMED.slot_layer_us * 1e-6
    assert filled.decode_step_s - in_place.decode_step_s == pytest.approx(more)
    assert filled.resident_step_s == in_place.resident_step_s


def test_a_cpu_engine_reads_the_active_experts_of_all_ranks_from_host_memory():
    rate, reads = 600e9 * ASSUMED.cpu_efficiency, 4 * 10 * EXPERT
    beside = (10**9 + 10**6) / VRAM + 10 * OVERHEAD
    none = speed(0, 0.0, machine={"host_gbps": 600})
    assert none.cpu_engine_step_s == pytest.approx(beside + reads / rate)
    assert none.cpu_engine_tokens_s == pytest.approx(1 / none.cpu_engine_step_s)
    cut = speed(0, 0.0, machine={"host_gbps": 600}, parallel=Parallel(tp=4))
    collectives = 10 * 2 * ASSUMED.collective_us * 1e-6
    assert cut.cpu_engine_step_s - collectives - beside == pytest.approx(4 * reads / rate), "four slices of each"
    assert speed(machine={"host_gbps": 0}).cpu_engine_step_s == 0


@pytest.mark.parametrize("slots", [0, 8])
def test_a_cpu_engine_has_as_many_experts_in_vram(slots):
    """And they are no likelier to be used than others."""
    found, none = (speed(n, 0.9, machine={"host_gbps": 600}, slots=s) for n, s in ((32 - slots, slots), (0, 0)))
    half, rate = 2 * 10 * EXPERT, 600e9 * ASSUMED.cpu_efficiency
    assert none.cpu_engine_step_s - found.cpu_engine_step_s == pytest.approx(half / rate - half / VRAM)


# Prefill in place


def test_prefill_reads_every_offloaded_expert_once_for_each_block_of_rows_in_each_chunk():
    """32 offloaded experts share half of the uses: 32 rows each of 512 tokens, 128 of 2048, and half a block more."""
    once = 32 * 10 * EXPERT / READ
    times = {tokens: speed(prompt_tokens=tokens).prefill_chunk_s / once for tokens in (512, 2048, 4096)}
    assert times == pytest.approx({512: 1, 2048: 1.5, 4096: 2.5}, rel=0.2)
    halved = speed(prompt_tokens=4096, chunk=2048)
    assert 4096 / halved.prefill_tokens_s == pytest.approx(2 * times[2048] * once)
    tall = speed(prompt_tokens=4096, assumed=replace(ASSUMED, rows_per_read=256))
    assert times[4096] * once - tall.prefill_chunk_s == pytest.approx(once), "blocks of twice the rows"
    served = speed(prompt_tokens=4096, hit_rate=0.75).prefill_chunk_s
    assert times[4096] * once - served == pytest.approx(once, rel=0.1), "residents take more of the rows"


def test_a_short_prompt_takes_as_long_as_its_launches_which_hide_reads_over_the_link():
    launching = 10 * ASSUMED.prefill_layer_ms * 1e-3
    assert speed(64, 1.0, prompt_tokens=64).prefill_chunk_s == pytest.approx(launching)
    latent = speed(64, 1.0, stage=replace(STAGE, latent_attention=True), prompt_tokens=64)
    assert latent.prefill_chunk_s == pytest.approx(10 * ASSUMED.latent_prefill_layer_ms * 1e-3)
    assert speed(63, 63 / 64, prompt_tokens=64).prefill_chunk_s == pytest.approx(launching), "one expert a layer is read sooner"
    assert speed(0, 0.0, prompt_tokens=64).prefill_chunk_s > 10 * 60 * EXPERT / READ, "the link takes longer"


def test_a_prefill_in_place_is_served_by_slots_by_chance_whatever_decoding_hits():
    found = speed(16, 0.9, slots=16, prompt_tokens=256)
    assert found.prefill_chunk_s == speed(32, 0.5, prompt_tokens=256).prefill_chunk_s
    assert found.hit_rate == 0.9


# Streamed prefill, with two dense layers

MIXED = replace(STAGE, expert_layers=(EXPERT,) * 8)
SLOW = replace(MIXED, expert_flops=2e9)
TWO = Stream(2, 128)


def copying(offloaded: int) -> float:
    """Seconds for the offloaded experts of one layer."""
    return offloaded * EXPERT / COPY


def in_vram(resident: int) -> float:
    """Seconds for the resident experts of one layer."""
    return resident * EXPERT / (ASSUMED.vram_copy_gbps * 1e9)


LOST = ASSUMED.copy_slows * copying(32) + ASSUMED.vram_copy_slows * in_vram(32)
"""Seconds that a layer computes for longer beside a copy of half its experts."""


def computing(tokens: int, stage: StageCost) -> float:
    """Seconds of a long chunk with all experts in VRAM."""
    flops = tokens * (stage.dense_flops + 4 * len(stage.expert_layers) * stage.expert_flops)
    return flops / (989e12 * ASSUMED.compute_efficiency) + stage.layers * OVERHEAD


def streamed(stage: StageCost, stream: Stream = TWO, **changes: Any) -> float:
    found = speed(stage=stage, stream=stream, **changes)
    assert found.streamed
    assert found.decode_step_s == speed(stage=stage, **changes).decode_step_s, "decoding is not"
    return found.prefill_chunk_s


def hiding(stage: StageCost, stream: Stream = TWO, resident: int = 32) -> int:
    return SpeedModel(64, 4, [stage], preset("1xH200"), Parallel(), ASSUMED).hiding_chunk(resident, stream)


def test_a_streamed_chunk_copies_each_offloaded_expert_once_beside_computing():
    """The link takes longer than computing: it is idle while the last of the eight MoE layers computes its experts."""
    stage = replace(MIXED, dense_flops=1.5e9)
    experts = (computing(4096, stage) - computing(4096, replace(stage, expert_layers=()))) / 8
    assert streamed(stage) == pytest.approx(8 * copying(32) + experts)
    assert streamed(stage) < speed(stage=stage).prefill_chunk_s
    assert streamed(stage, parallel=Parallel(2, 2)) < 0.6 * streamed(stage), "each rank copies its own"
    assert streamed(stage, resident=16, slots=16) == streamed(stage), "what is neither resident nor in a slot"


def test_a_chunk_that_computes_for_longer_hides_its_stream_but_for_what_the_copies_take_from_it():
    slow = replace(SLOW, dense_flops=2e10)
    assert streamed(slow) == pytest.approx(computing(4096, slow) + 8 * LOST)


@pytest.mark.parametrize(("stream", "resident"), [(Stream(0, 1), 32), (Stream(2, 4097), 32), (Stream(2, 1), 64)])
def test_prefill_reads_in_place_without_buffers_with_few_tokens_and_with_every_expert_resident(stream, resident):
    assert speed(resident, stream=stream) == speed(resident)


def test_the_chunk_that_hides_its_stream_is_the_smallest_that_computes_for_as_long_as_it_copies():
    stage = replace(MIXED, layers=8, expert_flops=2e8)
    chunk = hiding(stage)
    assert chunk % 256 == 0
    assert computing(chunk, stage) >= 8 * copying(32) > computing(chunk - 256, stage)
    assert hiding(stage, resident=48) < chunk < hiding(stage, Stream(1, 128))
    assert hiding(stage, Stream(2, chunk + 1)) == chunk + 256, "smaller ones do not stream"
    assert hiding(replace(stage, expert_flops=2e3, dense_flops=2e5)) == hiding(MIXED, IN_PLACE) == 0


def test_a_stream_on_a_measured_link_runs_at_the_copy_kernels_rate():
    def chunk(**rates: float) -> float:
        where = replace(preset("8xH20"), measured=links.rates(**rates))
        found = planned(on=where, given={"num_resident": 60}).speeds[0]
        assert found.streamed
        return found.prefill_chunk_s

    assert chunk(copied=50.0) == chunk(copied=50.0, engine=30.0, scattered=20.0, sequential=25.0) < chunk(copied=40.0)

"""Plans with slots: what they take of VRAM and host RAM, how fast they are predicted to be, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sglang_uvm_offload.cli import plan as planner_cli
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.plan import planner
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.draft_cost import draft_note
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, Machine, preset
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.routing_curves import hit_rates
from sglang_uvm_offload.plan.speed import predict
from sglang_uvm_offload.plan.stage_cost import StageCost, Stream
from sglang_uvm_offload.residency.budget import Division
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots

MODEL = Path(__file__).parents[1] / "fixtures" / "models" / "deepseek-v3.json"
AUTO = Slots(None)
MATRIX = 7168 * 2048 // 8
"""One matrix of an expert in FP8 on one of eight ranks; two of three lie in one tensor."""


@cache
def model() -> ModelShape:
    return shape_of(MODEL)


def machine(host_gib: int = 4096) -> Machine:
    return dataclasses.replace(preset("8xH20"), host_bytes=host_gib * GIB)


def ask(slots: Slots = NO_SLOTS, parallel: Parallel | None = None, host_gib: int = 4096, **options: Any) -> Plan:
    work = Workload(8192, requests=2)
    return planner.plan(model(), machine(host_gib), work, parallel or Parallel(tp=8), slots=slots, **options)


def test_auto_divides_what_fits_as_a_launch_does():
    without, divided = ask(), ask(AUTO)
    assert divided.slots == AUTO.of(divided.rows, 256) > 0
    assert without.num_resident is not None
    assert abs(divided.rows - without.num_resident) <= 1, "but for the blocks that slots round up to"
    of_profile = ask(Slots(None, {0.5: 0.25}))
    assert of_profile.slots == of_profile.rows // 4


def test_a_slot_takes_a_row_of_every_tensor_and_its_expert_stays_in_host_ram():
    fixed, divided = ask(num_resident=60), ask(Slots(100), num_resident=60)
    (before,), (after,) = fixed.ranks, divided.ranks
    layouts = [ExpertLayout(256, nbytes, BLOCK_BYTES, 100) for nbytes in (2 * MATRIX, MATRIX)]
    edges = 58 * sum(layout.edge_bytes for layout in layouts)
    scales = 58 * 3 * (7168 // 128) * (2048 // 128) * 4 // 8
    assert after.slot_bytes == 58 * sum(layout.slot_bytes for layout in layouts) + 100 * scales
    assert after.resident_bytes == before.resident_bytes + edges
    assert after.used_bytes - before.used_bytes == after.slot_bytes + edges
    assert (after.host_bytes, divided.host_needed) == (before.host_bytes, fixed.host_needed)
    assert before.slot_bytes == 0


def test_ranks_of_experts_share_the_slots():
    whole = ask(Slots(96), Parallel(tp=8, ep=8), num_resident=64).ranks[0]
    assert whole.slot_bytes == pytest.approx(ask(Slots(96), num_resident=64).ranks[0].slot_bytes, rel=0.02)


def test_a_number_of_slots_is_taken_from_what_fits():
    found = ask(Slots(40))
    assert found.slots == 40
    assert found.num_resident == found.rows - 40 > 0
    assert "--expert-offload-slots 40" in found.flags
    assert f"--expert-offload-num-resident {found.num_resident}" in found.flags
    assert not any("slots" in flag for flag in ask().flags)


@pytest.mark.parametrize(
    ("slots", "options", "problem"),
    [
        (Slots(255), {}, r"--expert-offload-slots 255: \d+ rows a layer fit in VRAM; give at most as many, or auto"),
        (
            Slots(57),
            {"num_resident": 200},
            "--expert-offload-slots 57: 200 residents leave 56 of 256 experts a layer offloaded",
        ),
        (
            Slots(100),
            {"num_resident": 150},
            "--expert-offload-num-resident 150: leaves no room for a KV cache of 16384 tokens",
        ),
        (
            Slots(100),
            {"num_resident": 60, "host_gib": 300},
            "--expert-offload-num-resident 60: the offloaded experts need ",
        ),
    ],
)
def test_slots_that_cannot_be_are_refused_with_what_would_be_right(slots, options, problem):
    found = ask(slots, **options)
    assert not found.fits
    assert re.match(problem, found.problems[0])


def test_auto_takes_no_more_slots_than_host_ram_has_room_for():
    """Every slot leaves one more expert in host RAM."""
    plenty, short = ask(AUTO), ask(AUTO, host_gib=400)
    assert 0 < short.slots < plenty.slots
    assert short.host_needed <= 400 * GIB
    beyond = ask(Slots(short.slots + 1), host_gib=400)
    assert "the offloaded experts need" in beyond.problems[0]
    (note,) = [note for note in short.notes if "because host RAM" in note]
    assert note.startswith(f"--expert-offload-slots auto: {short.slots} slots, not {AUTO.of(short.rows, 256)}, because")
    assert not any("because host RAM" in note for note in plenty.notes)


def test_where_every_expert_fits_slots_are_of_no_use():
    for slots in (AUTO, Slots(300)):
        found = planner.plan(model(), preset("8xB200"), Workload(8192), Parallel(tp=8), slots=slots)
        assert (found.num_resident, found.slots) == (256, 0)
        no_use = ", and --expert-offload-slots is of no use" if slots.asked else ""
        assert f"every expert fits in VRAM: offloading is not needed{no_use}" in found.notes


def test_flags_choose_the_runner_that_computes_from_slots_where_sglang_would_choose_another():
    oss = shape_of(MODEL.with_name("gpt-oss-120b.json"))
    for slots, chosen in ((AUTO, True), (NO_SLOTS, False)):
        found = planner.plan(oss, preset("4x4090"), Workload(8192), Parallel(tp=4), slots=slots)
        assert bool(found.slots) == chosen == ("--moe-runner-backend marlin" in found.flags)
    assert not any("runner" in flag for flag in ask(AUTO).flags)


@pytest.mark.sglang
def test_the_quantisations_that_need_it_are_those_that_slots_know():
    from sglang_uvm_offload.plugin.slots.runners import AUTO, BY_BLOCKS, MARLIN

    assert {name for name, runners in BY_BLOCKS.items() if runners >= MARLIN and not runners & AUTO} == planner.BY_MARLIN


def test_few_residents_beside_slots_are_of_use():
    assert ask(num_resident=4).useless
    assert not ask(Slots(100), num_resident=4).useless
    (few,) = ask(Slots(5), num_resident=4).useless
    assert few.startswith("9 residents and slots are fewer than twice the 8 experts that a token uses")


def test_hit_rates_are_those_of_measured_routing_with_slots():
    found = ask(AUTO)
    measured = hit_rates("deepseek_v3", 1, found.rows / 256, found.slots / found.rows)
    assert [speed.hit_rate for speed in found.speeds[:3]] == [each.rate for each in measured.named().values()]
    assert {speed.measured_on.policy for speed in found.speeds} == {"slots", "other_slots"}


def test_drafts_are_weighed_with_slots():
    work = Workload(8192, speculative=True, draft_tokens=10)
    case = Case(model(), machine(), work, Parallel(tp=8), Reserve(), Assumptions(), slots=Slots(60))
    rate = hit_rates("deepseek_v3", 1, 64 / 256, 60 / 64).lowest.rate
    assert rate > 4 / 8, "more than four residents could serve of a token's eight choices"
    assert f"the lowest measured hit rate, {rate:.0%})" in draft_note(case, Division(4, 60, 0))


def test_the_report_shows_slots_and_what_is_assumed_of_them():
    found = ask(AUTO)
    text = planner.render(found)
    assert f"It fits: {found.num_resident} of 256 experts a layer resident, and {found.slots} slots (" in text
    assert "every miss is taken to fill one" in text
    assert "slots need SGLang's Triton, Marlin or DeepGEMM MoE runner" in text
    assert "\n  slots  " in text
    assert "\n  slots  " not in planner.render(ask())


STAGE = StageCost(10, 10**9, 2e9, (10**7,) * 10, 2e7, 10**6)


def speed(resident: int = 16, slots: int = 16, hit_rate: float = 0.5, stream: Stream | None = None, prompt: int = 4096) -> Any:
    rest = (preset("1xH200"), Workload(4096, prompt_tokens=prompt), Parallel(), 1, 4096, Assumptions())
    return predict("test", hit_rate, resident, 64, 4, [STAGE], *rest, stream or Stream(0, 0), slots=slots)


def test_a_miss_crosses_the_link_once_and_is_then_read_from_vram():
    filled, in_place = speed(), speed(resident=32, slots=0)
    assert (filled.hit_rate, filled.missed_bytes) == (in_place.hit_rate, in_place.missed_bytes)
    assumed, missed = Assumptions(), 20 * 10**7
    copying = missed / (55e9 * assumed.copy_efficiency) - missed / (55e9 * assumed.read_efficiency)
    more = copying + missed / (4800e9 * assumed.hbm_efficiency) + 10 * assumed.slot_layer_us * 1e-6
    assert filled.decode_step_s - in_place.decode_step_s == pytest.approx(more)
    assert filled.resident_step_s == in_place.resident_step_s


def test_a_streamed_prefill_copies_what_is_neither_resident_nor_in_a_slot():
    stream = Stream(2, 1024)
    assert speed(stream=stream).prefill_chunk_s == speed(resident=32, slots=0, stream=stream).prefill_chunk_s
    assert speed(stream=stream).prefill_chunk_s < speed(resident=16, slots=0, stream=stream).prefill_chunk_s


def test_a_prefill_in_place_is_served_by_chance_whatever_decoding_hits():
    found = speed(hit_rate=0.9, prompt=256)
    assert found.prefill_chunk_s == speed(resident=32, slots=0, hit_rate=0.5, prompt=256).prefill_chunk_s
    assert found.hit_rate == 0.9


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    planner_cli.add_arguments(parser)
    return planner_cli.run(parser.parse_args([str(MODEL), "--machine", "8xH20", *map(str, words)]))


def test_the_command_plans_with_slots(capsys):
    assert run("--slots", "auto", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["slots"] == AUTO.of(found["num_resident"] + found["slots"], 256)
    assert found["ranks"][0]["slot_bytes"] > 0
    assert run("--slots", 30, "--num-resident", 50, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_resident"], found["slots"]) == (50, 30)
    for wrong in ("-1", "some"):
        with pytest.raises(SystemExit):
            run("--slots", wrong)
        assert f"--slots: '{wrong}' is not " in capsys.readouterr().err

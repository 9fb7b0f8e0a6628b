"""Plans with slots: what they take of VRAM and host RAM, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders.plans import machine, planned

from sglang_uvm_offload.memory.layout import whole_blocks
from sglang_uvm_offload.plan.inputs import Parallel
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.planner import render
from sglang_uvm_offload.plan.routing_curves import hit_rates
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots

AUTO = Slots(None)
MATRIX = 7168 * 2048 // 8
"""One matrix of an expert in FP8 on one of eight ranks; two of three lie in one tensor."""


def ask(slots: Slots = NO_SLOTS, host_gib: int = 4096, parallel: Parallel | None = None, **given: Any) -> Plan:
    return planned(on=machine(host_gib=host_gib), parallel=parallel, given={"slots": slots, **given})


def test_auto_divides_what_fits_as_a_launch_does():
    without, divided = ask(), ask(AUTO)
    assert divided.slots == AUTO.of(divided.rows, 256) > 0
    assert without.num_resident is not None
    buffers = 2 * 256 / 58
    assert divided.rows - without.num_resident == pytest.approx(buffers, abs=1), "slots take the place of stream buffers"
    of_profile = ask(Slots(None, {0.5: 0.25}))
    assert of_profile.slots == of_profile.rows // 4
    measured = hit_rates("deepseek_v3", 1, divided.rows / 256, divided.slots / divided.rows)
    assert [speed.hit_rate for speed in divided.speeds[:3]] == [each.rate for each in measured.named().values()]


def test_a_slot_takes_a_row_of_every_tensor_and_its_expert_stays_in_host_ram():
    fixed, divided = ask(num_resident=60), ask(Slots(100), num_resident=60)
    (before,), (after,) = fixed.ranks, divided.ranks
    weights = sum(whole_blocks(58 * 100 * nbytes) for nbytes in (2 * MATRIX, MATRIX))
    scales = 58 * 3 * (7168 // 128) * (2048 // 128) * 4 // 8
    assert after.slot_bytes == weights + 100 * scales
    assert after.resident_bytes == before.resident_bytes
    assert (before.stream_buffers, after.stream_buffers) == (2, 0)
    assert after.used_bytes - before.used_bytes == after.slot_bytes - before.stream_bytes
    assert (after.host_bytes, divided.host_needed) == (before.host_bytes, fixed.host_needed)
    (of_whole_experts,) = ask(Slots(100), parallel=Parallel(tp=8, ep=8), num_resident=60).ranks
    assert of_whole_experts.slot_bytes == pytest.approx(after.slot_bytes, rel=0.05), "ranks of experts share them"


@pytest.mark.parametrize(
    ("slots", "options", "problem"),
    [
        (Slots(255), {}, r"--expert-offload-slots 255: \d+ rows a layer fit in VRAM; give at most as many, or auto"),
        (
            Slots(57),
            {"num_resident": 200},
            "--expert-offload-slots 57: 200 residents leave only 56 of 256 experts a layer",
        ),
        (Slots(100), {"num_resident": 150}, "--expert-offload-num-resident 150: leaves no room for a KV cache of 16384 tokens"),
        (Slots(100), {"num_resident": 60, "host_gib": 300}, "--expert-offload-num-resident 60: the offloaded experts need "),
    ],
)
def test_slots_that_cannot_be_are_refused_with_what_would_be_right(slots, options, problem):
    found = ask(slots, **options)
    assert not found.fits
    assert re.match(problem, found.problems[0])


def test_fewer_slots_than_are_usual_where_host_ram_holds_no_more_are_noted():
    plenty, short = ask(AUTO), ask(AUTO, host_gib=400)
    assert 0 < short.slots < plenty.slots
    assert short.host_needed <= 400 * GIB
    (note,) = [note for note in short.notes if "because host RAM" in note]
    assert note.startswith(f"--expert-offload-slots auto: {short.slots} of {AUTO.of(short.rows, 256)} slots, because")
    assert not any("because host RAM" in note for note in plenty.notes)


def test_where_every_expert_fits_slots_are_of_no_use():
    for slots in (AUTO, Slots(300)):
        found = planned(on="8xB200", given={"slots": slots})
        assert (found.num_resident, found.slots) == (256, 0)
        no_use = ", and --expert-offload-slots has no effect" if slots.asked else ""
        assert f"every expert fits in VRAM: offloading is not needed{no_use}" in found.notes


def test_flags_choose_the_runner_that_computes_from_slots_where_sglang_would_choose_another():
    for slots, chosen in ((AUTO, True), (NO_SLOTS, False)):
        found = planned("gpt-oss-120b", preset("4x4090"), given={"slots": slots})
        assert bool(found.slots) == chosen == ("--moe-runner-backend marlin" in found.flags)
    assert not any("runner" in flag for flag in ask(AUTO).flags)


def test_few_residents_beside_slots_are_of_use():
    assert ask(num_resident=4).useless
    assert not ask(Slots(100), num_resident=4).useless
    (few,) = ask(Slots(5), num_resident=4).useless
    assert few.startswith("9 residents and slots are fewer than twice the 8 experts that a token uses")


def test_the_report_shows_slots():
    found = ask(Slots(40))
    text = render(found, explain=True)
    assert found.num_resident == found.rows - 40
    assert f"It fits: VRAM for {found.rows} of 256 experts a layer (" in text
    assert "slots need SGLang's Triton, Marlin or DeepGEMM MoE runner" in text
    assert {"--expert-offload-slots 40", f"--expert-offload-num-resident {found.num_resident}"} < set(found.flags)
    assert "\n  slots  " in text
    assert "\n  slots  " not in render(ask(), explain=True)

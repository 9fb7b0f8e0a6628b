"""What a plan suggests to a machine that is short: each remedy, followed to the letter, is enough."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from sglang_uvm_offload.plan import planner
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.planner import plan_case
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots

MODELS = Path(__file__).parents[1] / "fixtures" / "models"


@cache
def model(name):
    return shape_of(MODELS / f"{name}.json")


def case_of(name, machine, host_gib=None, parallel=None, reserve=None, slots=NO_SLOTS, **work):
    machine = preset(machine)
    if host_gib is not None:
        machine = dataclasses.replace(machine, host_bytes=host_gib * GIB)
    work = Workload(**{"context_length": 8192, **work})
    parallel = parallel or Parallel(tp=machine.gpus)
    return Case(model(name), machine, work, parallel, reserve or Reserve(), planner.Assumptions(), slots=slots)


def followed(case, need):
    """The case that ``need`` asks for, by its words and flags alone."""
    flags = dict(re.findall(r"(--[a-z-]+) (\d+)", need))
    if "no stream buffers" in need:
        return dataclasses.replace(case, reserve=dataclasses.replace(case.reserve, stream_gb=0))
    machine, parallel, work = case.machine, case.parallel, case.workload
    if host := re.search(r"host RAM of (\d+) GiB$|(\d+) GiB of host RAM$", need):
        machine = dataclasses.replace(machine, host_bytes=int(host[1] or host[2]) * GIB)
    if vram := re.match(r"GPUs of (\d+) GiB each", need):
        machine = dataclasses.replace(machine, vram_bytes=int(vram[1]) * GIB)
    if gpus := re.match(r"(\d+) such GPUs", need):
        machine = dataclasses.replace(machine, gpus=int(gpus[1]))
    if "--tp-size" in flags:
        sizes = {name: int(flags.get(f"--{name}-size", 1)) for name in ("tp", "ep")}
        pp = int(flags.get("--pp-size", case.parallel.pp if "such GPUs" in need else 1))
        parallel = dataclasses.replace(parallel, **sizes, pp=pp)
    if "--max-total-tokens" in flags:
        work = dataclasses.replace(work, max_total_tokens=int(flags["--max-total-tokens"]))
    changed = dataclasses.replace(case, machine=machine, parallel=parallel, workload=work)
    assert changed != case, need
    return changed


SHORT = [
    ("glm-4.5-air", "3x4090", {}),
    ("glm-4.5-air", "5x4090", {}),
    ("glm-4.5-air", "1x4090", {"host_gib": 150, "context_length": 32768}),
    ("glm-4.5-air", "1x3090", {"context_length": 131072, "requests": 4}),
    ("glm-4.5-air", "4x4090", {"host_gib": 32}),
    ("glm-4.5", "7x5090", {}),
    ("deepseek-v3", "32xH100", {}),
    ("deepseek-v3", "8xH20", {"host_gib": 64, "context_length": 163840, "requests": 4}),
    ("deepseek-v3", "2x4090", {"host_gib": 500}),
    ("deepseek-v3", "4xL40S", {"host_gib": 256, "reserve": Reserve(stream_gb=24)}),
    ("kimi-k2", "1x5090", {}),
    ("kimi-k2", "3xA100", {"host_gib": 1200}),
    ("kimi-k2", "8xA100-40GB", {"host_gib": 100, "parallel": Parallel(tp=4, pp=2)}),
    ("gpt-oss-120b", "1x3090", {"host_gib": 16}),
    ("qwen3-235b-a22b", "6x4090", {}),
    ("qwen3-235b-a22b", "1x5090", {"host_gib": 4096, "context_length": 40960, "requests": 8}),
    ("qwen3-235b-a22b", "8x4090", {"parallel": Parallel(tp=16)}),
    ("qwen3-235b-a22b", "8x4090", {"parallel": Parallel(tp=8, ep=3)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "machine", "changes"), SHORT, ids=lambda value: str(value)[:40])
def test_every_suggestion_to_a_short_machine_is_enough(name, machine, changes):
    case = case_of(name, machine, **changes)
    refused = plan_case(case)
    assert not refused.fits
    assert refused.needs or "give --max-total-tokens" in refused.problems[0], refused.problems
    cache = re.findall(r"give --max-total-tokens \d+ or fewer", refused.problems[0]) if len(refused.problems) == 1 else []
    for need in (*refused.needs, *cache):
        result = plan_case(followed(case, need))
        assert result.fits, (need, result.problems)
        assert result.flags


def test_ranks_that_cut_experts_are_answered_with_ranks_that_do_not():
    refused = plan_case(case_of("glm-4.5-air", "3x4090"))
    assert refused.problems == ("--tp-size 3 with --ep-size 1: 3 ranks do not divide an expert's 1408 hidden units",)
    assert refused.needs == ("--tp-size 1 --pp-size 3 (3 of 3 GPUs)", "--tp-size 2 (2 of 3 GPUs)")


def test_what_no_ranks_can_mend_names_none():
    refused = plan_case(case_of("qwen3-235b-a22b", "8xH20", context_length=50000))
    assert refused.problems == ("--context-length 50000: the model allows 40960",)
    assert not refused.needs


@pytest.mark.parametrize(("name", "machine", "changes"), SHORT, ids=lambda value: str(value)[:40])
def test_no_gpu_is_suggested_that_does_not_exist(name, machine, changes):
    largest = max(gpu.memory_mib for gpu in GPUS.values()) >> 10
    for need in plan_case(case_of(name, machine, **changes)).needs:
        if vram := re.match(r"GPUs of (\d+) GiB each \((\S+)( or \S+)?\)", need):
            assert int(vram[1]) <= min(largest, GPUS[vram[2]].memory_mib >> 10)
        assert not need.startswith("GPUs") or vram, need


def test_more_slots_than_fit_are_answered_with_as_many_as_do():
    case = case_of("deepseek-v3", "8xH20", 4096, slots=Slots(255))
    (problem,) = plan_case(case).problems
    wanted = int(re.search(r": (\d+) rows a layer fit", problem)[1])
    assert plan_case(dataclasses.replace(case, slots=Slots(wanted))).fits


def test_host_ram_without_room_for_moves_is_noted():
    case = case_of("glm-4.5-air", "4x4090", 512)
    at_start, later = (case.host_need(case.division, moves).total for moves in (False, True))
    short = plan_case(case_of("glm-4.5-air", "4x4090", (at_start + later) // 2 // GIB))
    assert short.num_resident == plan_case(case).num_resident
    assert any("host RAM use would grow" in note for note in short.notes)
    assert not any("host RAM use would grow" in note for note in plan_case(case).notes)


def test_idle_gpus_are_noted():
    staged = plan_case(case_of("glm-4.5-air", "8x4090", parallel=Parallel(tp=2, pp=3)))
    assert staged.notes[0] == "6 of 8 GPUs are used (tensor parallelism over 2, 3 pipeline stages); the others stay idle"
    assert not any("idle" in note for note in plan_case(case_of("glm-4.5-air", "8x4090")).notes)


# What else would bring residents


def test_the_parts_of_the_memory_table_sum_up_to_the_gpu():
    for machine in ("4x4090", "8xH20", "1x5090"):
        planned = plan_case(case_of("glm-4.5-air", machine, 4096))
        vram = planned.vram
        parts = dataclasses.astuple(vram)
        assert sum(parts) == planned.machine.vram_bytes
        assert min(parts) >= 0
        assert vram.granted == planned.ranks[0].budget_bytes
    shared = Reserve(0.8, free_vram_bytes=20 * GIB, image_bytes=GIB)
    vram = case_of("glm-4.5-air", "4x4090", 4096, reserve=shared).vram
    assert (vram.in_use, vram.images) == (preset("4x4090").vram_bytes - 20 * GIB, GIB)
    assert sum(dataclasses.astuple(vram)) == preset("4x4090").vram_bytes
    assert vram.sglang == pytest.approx(0.2 * (20 * GIB - vram.runtime), abs=1)


def test_flags_that_bring_more_residents_are_planned_with_and_shown_with_their_price():
    case = case_of("glm-4.5-air", "4x4090")
    planned = plan_case(case)
    chunk, fraction = found = planner.alternatives(case, planned)
    assert [other.flag for other in found] == ["--chunked-prefill-size 1024", "--mem-fraction-static 0.9"]
    for other, reserve in ((chunk, Reserve(chunked_prefill_size=1024)), (fraction, Reserve(0.9))):
        again = plan_case(dataclasses.replace(case, reserve=reserve))
        assert (other.num_resident, other.sglang_bytes) == (again.num_resident, again.vram.sglang)
        assert other.num_resident > planned.num_resident
        assert other.sglang_bytes < planned.vram.sglang
    text = planner.render(dataclasses.replace(planned, alternatives=found))
    assert f"--chunked-prefill-size 1024  {chunk.num_resident} " in text
    assert "may run out of memory" in text


def test_flags_that_were_given_or_bring_nothing_are_not_shown():
    given = case_of("glm-4.5-air", "4x4090", reserve=Reserve(0.95, chunked_prefill_size=2048))
    assert not planner.alternatives(given, plan_case(given))
    modest = case_of("glm-4.5-air", "4x4090", reserve=Reserve(0.8))
    assert "--mem-fraction-static 0.9" not in [other.flag for other in planner.alternatives(modest, plan_case(modest))]
    whole = case_of("glm-4.5-air", "8xH20")
    assert not planner.alternatives(whole, plan_case(whole)), "every expert fits"
    lavish = case_of("glm-4.5-air", "4x4090", reserve=Reserve(0.95))
    assert [other.flag for other in planner.alternatives(lavish, plan_case(lavish))] == []

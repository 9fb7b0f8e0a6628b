"""What a plan suggests to a machine that is short: each remedy, followed to the letter, is enough."""

import dataclasses
import re

import pytest
from builders.plans import case, machine

from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import Parallel
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.planner import plan


def followed(asked, need):
    """The case that ``need`` asks for, by its words and flags alone."""
    flags = dict(re.findall(r"(--[a-z-]+) (\d+)", need))
    if "no stream buffers" in need:
        return dataclasses.replace(asked, reserve=dataclasses.replace(asked.reserve, stream_gb=0))
    where, parallel, work = asked.machine, asked.parallel, asked.workload
    if host := re.search(r"host RAM of (\d+) GiB$|(\d+) GiB of host RAM$", need):
        where = dataclasses.replace(where, host_bytes=int(host[1] or host[2]) * GIB)
    if vram := re.match(r"GPUs of (\d+) GiB each \((\S+)( or \S+)?\)", need):
        assert int(vram[1]) <= GPUS[vram[2]].memory_mib >> 10, "of a kind that exists"
        where = dataclasses.replace(where, vram_bytes=int(vram[1]) * GIB)
    if gpus := re.match(r"(\d+) GPUs of \d+ GiB, as now", need):
        where = dataclasses.replace(where, gpus=int(gpus[1]))
    if "--tp-size" in flags:
        sizes = {name: int(flags.get(f"--{name}-size", 1)) for name in ("tp", "ep")}
        pp = int(flags.get("--pp-size", asked.parallel.pp if "as now" in need else 1))
        parallel = dataclasses.replace(parallel, **sizes, pp=pp)
    if "--max-total-tokens" in flags:
        work = dataclasses.replace(work, max_total_tokens=int(flags["--max-total-tokens"]))
    changed = dataclasses.replace(asked, machine=where, parallel=parallel, workload=work)
    assert changed != asked, need
    return changed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on", "changes"),
    [
        ("glm-4.5-air", machine("1x4090", 150), {"context_length": 32768}),
        ("glm-4.5-air", machine("1x3090", 192), {"context_length": 131072, "requests": 4}),
        ("glm-4.5-air", machine("4x4090", 32), {}),
        ("glm-4.5", preset("7x5090"), {}),
        ("deepseek-v3", preset("32xH100"), {}),
        ("deepseek-v3", machine("8xH20", 64), {"context_length": 163840, "requests": 4}),
        ("deepseek-v3", machine("4xL40S", 256), {"given": {"stream_gb": 24}}),
        ("kimi-k2", preset("1x5090"), {}),
        ("kimi-k2", machine("8xA100-40GB", 100), {"parallel": Parallel(tp=4, pp=2)}),
        ("gpt-oss-120b", machine("1x3090", 16), {}),
        ("qwen3-235b-a22b", machine("1x5090", 4096), {"context_length": 40960, "requests": 8}),
        ("qwen3-235b-a22b", preset("8x4090"), {"parallel": Parallel(tp=8, ep=3)}),
    ],
    ids=str,
)
def test_every_suggestion_to_a_short_machine_is_enough(name, on, changes):
    asked = case(name, on, **{"requests": 1, **changes})
    refused = plan(asked)
    assert not refused.fits
    assert refused.needs or "give --max-total-tokens" in refused.problems[0], refused.problems
    cache = re.findall(r"give --max-total-tokens \d+ or fewer", refused.problems[0]) if len(refused.problems) == 1 else []
    for need in (*refused.needs, *cache):
        result = plan(followed(asked, need))
        assert result.fits, (need, result.problems)
        assert result.flags


def test_no_more_is_suggested_than_is_needed():
    asked = case(on=machine(host_gib=64), context_length=163840, requests=4)
    host, vram, _ = plan(asked).needs
    less = {"host_bytes": (int(host.split()[3]) - 1) * GIB}, {"vram_bytes": (int(vram.split()[2]) - 8) * GIB}
    assert not any(plan(dataclasses.replace(asked, machine=dataclasses.replace(asked.machine, **each))).fits for each in less)


def test_ranks_that_cut_experts_are_answered_with_ranks_that_do_not():
    refused = plan(case("glm-4.5-air", preset("3x4090"), requests=1))
    assert refused.problems == ("--tp-size 3 with --ep-size 1: 3 ranks do not divide an expert's 1408 hidden units",)
    assert refused.needs == ("--tp-size 1 --pp-size 3 (3 of 3 GPUs)", "--tp-size 2 (2 of 3 GPUs)")
    assert not plan(case("qwen3-235b-a22b", context_length=50000)).needs, "no ranks can mend that"


def test_host_ram_without_room_for_moves_is_noted():
    asked = case("glm-4.5-air", preset("4x4090"), requests=1)
    at_start, later = (asked.host_need(asked.division, moves).total for moves in (False, True))
    short = plan(dataclasses.replace(asked, machine=machine("4x4090", (at_start + later) // 2 // GIB)))
    assert short.num_resident == plan(asked).num_resident
    assert any("host RAM use would grow" in note for note in short.notes)
    assert not any("host RAM use would grow" in note for note in plan(asked).notes)


def test_idle_gpus_are_noted():
    staged = plan(case("glm-4.5-air", "8x4090", parallel=Parallel(tp=2, pp=3)))
    assert staged.notes[0] == "6 of 8 GPUs are used (tensor parallelism over 2, 3 pipeline stages); the others stay idle"
    assert not any("idle" in note for note in plan(case("glm-4.5-air", "8x4090")).notes)

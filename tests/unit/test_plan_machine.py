"""Machines to plan for: presets, this one, and others by their figures; and how fast their links are taken to be."""

from __future__ import annotations

import dataclasses

import pytest
from builders.plans import machine, planned

from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel
from sglang_uvm_offload.plan.machine import GIB, MachineError, describe, of_gpus, preset
from sglang_uvm_offload.plan.planner import render
from sglang_uvm_offload.plan.rates import read_rate


@pytest.mark.parametrize("wrong", ["8xA0", "H20", "0xH20", "x", "8x"])
def test_a_preset_is_a_count_and_a_gpu(wrong):
    with pytest.raises(MachineError) as refused:
        preset(wrong)
    assert all(known in str(refused.value) for known in (repr(wrong), *GPUS, "--vram-gb", "--tflops"))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("4x4900", "4x4090"),
        ("4x RTX 4090", "4x4090"),
        ("4 x NVIDIA GeForce RTX 4090", "4x4090"),
        ("4090", "1x4090"),
        ("2x A100 80GB", "2xA100-80GB"),
        ("0xH20", "1xH20"),
    ],
)
def test_the_machine_that_was_meant_is_named(wrong, meant):
    with pytest.raises(MachineError, match=rf"did you mean {meant}\?"):
        preset(wrong)
    assert preset(meant)


@pytest.mark.parametrize("kind", GPUS)
def test_every_known_gpu_is_a_machine_in_any_number_and_case(kind):
    """Each rate has an address; where no worst one is published, the source says that ours is nominal."""
    found, gpu = preset(f"2x{kind}".lower()), GPUS[kind]
    assert (found.name, found.gpus, found.vram_bytes) == (f"2x{kind}", 2, gpu.memory_mib << 20)
    assert min(found.host_bytes, found.link_gbps, found.hbm_gbps, found.tflops, found.host_gbps) > 0
    assert "http" in found.source
    assert "assumed" in found.source
    assert 0 <= gpu.link.slowest < gpu.link.rate
    assert ("http" in gpu.link.slowest_source) == bool(gpu.link.slowest)
    assert gpu.link.slowest or "nominal" in gpu.link.source


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("1xa100", "1xA100-80GB"),
        ("4xrtx4090", "4x4090"),
        ("2xRTX-A6000", "2xA6000"),
        ("1xspark", "1xGB10"),
        ("8xh20-3e", "8xH20-141GB"),
    ],
)
def test_gpus_have_other_names(name, same):
    assert preset(name) == preset(same)


def test_host_ram_is_that_of_a_desktop_a_server_or_the_superchip():
    ram = {name: preset(name).host_bytes // GIB for name in ("1x4090", "4x4090", "2xH100", "2xGH200", "2xGB10", "8xh20")}
    assert ram == {"1x4090": 192, "4x4090": 512, "2xH100": 256, "2xGH200": 960, "2xGB10": 16, "8xh20": 1500}
    rates = {name: preset(name).host_gbps for name in ("2x3090", "8x4090", "2xH100")}
    assert rates == pytest.approx({"2x3090": 89.6, "8x4090": 307.2, "2xH100": 614.4})
    assert "host RAM of 1500 GiB at 614 GB/s assumed" in preset("8xH20").source


@pytest.mark.parametrize(
    ("name", "gib", "gbps"),
    [
        *(("NVIDIA A100-SXM4-40GB", 40, 1555), ("NVIDIA A100 80GB PCIe", 80, 2039), ("NVIDIA RTX A6000", 48, 768)),
        *(("NVIDIA GeForce RTX 3090", 24, 936), ("NVIDIA GH200 480GB", 96, 4000)),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives_it(name, gib, gbps):
    assert of_gpus([(name, gib * GIB)]).hbm_gbps == gbps


@pytest.mark.parametrize(("name", "link", "host"), [("1xGH200", 450, 546), ("4xGB200", 225, 1092), ("1xGB10", 273, 273)])
def test_coherent_machines_have_the_rate_of_their_own_link(name, link, host):
    named = preset(name)
    seen = of_gpus([("NVIDIA " + name[2:] + " 480GB", named.vram_bytes)] * named.gpus)
    for found in (named, seen):
        assert (found.link_gbps, found.host_gbps, found.one_memory) == (link, host, name == "1xGB10")


def test_an_integrated_gpu_has_what_is_available_of_the_hosts_memory(monkeypatch):
    monkeypatch.setattr("sglang_uvm_offload.plan.machine.host_available", lambda: 106 * GIB)
    seen = of_gpus([("NVIDIA Thing", 119 * GIB)], integrated=True)
    assert (seen.one_memory, seen.pool_bytes, of_gpus([("NVIDIA Thing", 119 * GIB)]).one_memory) == (True, 106 * GIB, False)
    where = dataclasses.replace(seen, link_gbps=100, hbm_gbps=100, tflops=100)
    assert planned("gpt-oss-120b", where).num_resident == 128, "it fits whole"
    assert planned("gpt-oss-120b", where, given={"num_resident": 64}).fits, "and once if a part is offloaded"


def test_figures_adjust_a_preset_or_describe_a_machine():
    adjusted = describe(preset("8xH20"), {"host_gb": 64.0, "gpus": None})
    assert (adjusted.host_bytes, adjusted.vram_bytes) == (64 * GIB, preset("8xH20").vram_bytes)
    assert adjusted.source.endswith("; as given: host_bytes")
    with pytest.raises(MachineError, match="--host-gb, --link-gbps, --hbm-gbps, --tflops: not known"):
        describe(None, {"gpus": 2, "vram_gb": 24.0})


# Links


@pytest.mark.parametrize(
    ("name", "ranks", "rate"),
    [
        *(("1xGH200", 1, 546 * 0.7), ("2xGB200", 2, 273 * 0.7), ("2x5090", 2, 89.6 * 0.7 / 2)),
        *(("1x5090", 1, 55 * 0.94), ("8x5090", 2, 55 * 0.94)),
    ],
)
def test_all_ranks_together_read_no_faster_than_the_hosts_memory(name, ranks, rate):
    assert read_rate(preset(name), Parallel(ranks), Assumptions()) == pytest.approx(rate * 1e9)
    unknown = dataclasses.replace(preset(name), host_gbps=0)
    assert read_rate(unknown, Parallel(ranks), Assumptions()) == pytest.approx(unknown.link_gbps * 0.94e9)


def test_predictions_range_from_the_worst_published_rate_of_such_a_link():
    where = preset("8xH20")
    found, worst = planned("glm-5-fp8", where), planned("glm-5-fp8", where.slowest)
    assert worst.num_resident == found.num_resident
    text = render(found, explain=True)
    for speed, least in zip(found.speeds, worst.speeds, strict=True):
        assert speed.slowest == speed.least == dataclasses.replace(least, measured_on=None)
        assert least.slowest is None
        assert least.decode_tokens_s < speed.decode_tokens_s
        assert least.prefill_ratio < speed.prefill_ratio
        assert f"{least.decode_tokens_s:.1f} to {speed.decode_tokens_s:.1f} tok/s" in text
    assert found.slowest_hiding_chunk == worst.hiding_chunk > found.hiding_chunk
    assert "\nLow: slowest published link of this kind (35 GB/s), mismatched profile. High: fastest, matching traffic." in text
    for requests in (1, 2):
        (row,) = [line for line in text.splitlines() if line.startswith(f"{requests} request") and "tok/s" in line]
        same = [speed for speed in found.speeds if speed.requests == requests]
        low = min(speed.least.decode_tokens_s for speed in same)
        assert f"{low:.1f} to {max(speed.decode_tokens_s for speed in same):.1f} tok/s" in row


def test_where_host_memory_is_the_limit_no_range_is_told():
    """Eight GPUs over PCIe 5 read less together than the worst published rate of one."""
    found = planned("gpt-oss-120b", preset("8x5090"), given={"num_resident": 96})
    assert all(speed.slowest == dataclasses.replace(speed, slowest=None, measured_on=None) for speed in found.speeds)
    assert "slowest published link" not in render(found)
    assert "a rank's share of host memory's 307.2 x 0.7: 26.9 GB/s" in render(found, explain=True)
    unknown = planned("gpt-oss-120b", machine("8x5090", host_gbps=0), given={"num_resident": 96})
    assert "read rate 55 GB/s x 0.94: 51.7 GB/s" in render(unknown, explain=True)


def test_a_rate_that_was_given_is_this_machines_own_and_no_range():
    found = planned("glm-5-fp8", describe(preset("8xH20"), {"link_gbps": 40.0}))
    assert all(speed.slowest is None and speed.least is speed for speed in found.speeds)
    assert "slowest published link" not in render(found)
    assert describe(preset("8xH20"), {"host_gb": 900.0}).slowest is not None

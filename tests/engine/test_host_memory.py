"""A launch whose host RAM holds what is offloaded, but not as well as it could, is served with a warning."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_uvm_offload.plugin.rank import host_memory
from sglang_uvm_offload.residency.budget import Division, RankBudget
from sglang_uvm_offload.residency.expert_sizes import ExpertSizes
from sglang_uvm_offload.residency.host_need import HostNeed

MIB = 1 << 20
PLACES = 16
HELD = [MIB * number for number in range(PLACES + 1)]
SIZES = ExpertSizes(HELD, HELD, HELD[::-1])
"""One layer with experts of a MiB."""
FEW = Division(12, 0, 0)


def rank(host: int, gpu: int = 0, one_memory: bool = False) -> RankBudget:
    return RankBudget(f"GPU {gpu}", 0, 0, 0, 0, SIZES, 0, gpu, node=0, host=host, one_memory=one_memory)


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    features = SimpleNamespace(enable_memory_saver=True)
    monkeypatch.setattr(host_memory, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(host_memory, "crowded", lambda by_gpu: [])
    return features


@pytest.mark.parametrize(
    ("given", "slots", "spare", "one_memory", "warned"),
    [
        (True, 0, 0, False, None),
        (True, 0, -1, False, "16.0 MiB"),
        (True, 4, 0, False, "20.0 MiB"),
        (True, 0, -1, True, None),
        (False, 0, -1, False, None),
    ],
)
def test_experts_that_host_ram_can_never_take_are_warned_of_where_memory_is_given_up(
    caplog: pytest.LogCaptureFixture, saver: SimpleNamespace, given: bool, slots: int, spare: int, one_memory: bool, warned: str
) -> None:
    """Two ranks' experts are twice as much."""
    saver.enable_memory_saver = given
    host = HostNeed(PLACES * MIB, 0).total + spare
    host_memory.warn_of_host_ram([rank(host, one_memory=one_memory)], Division(12, slots, 0))
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * (warned is not None)
    if warned is not None:
        assert "--enable-memory-saver: release_memory_occupation will not free the VRAM of experts: " in caplog.text
        assert f"host RAM would have to hold all of them ({warned}) but " in caplog.text
        caplog.clear()
        host_memory.warn_of_host_ram([rank(host), rank(host, gpu=1)], FEW)
        assert "32.0 MiB" in caplog.text


def test_a_numa_node_with_too_little_room_for_the_experts_of_its_gpus_is_named(
    caplog: pytest.LogCaptureFixture, saver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[int, int]] = []
    monkeypatch.setattr(host_memory, "crowded", lambda by_gpu: seen.append(dict(by_gpu)) or ["NUMA node 1 is short"])
    host_memory.warn_of_host_ram([rank(1 << 40), rank(1 << 40), rank(1 << 40, gpu=1)], FEW)
    assert seen == [{0: 8 * MIB, 1: 4 * MIB}]
    assert "Expert offload: NUMA node 1 is short" in caplog.text

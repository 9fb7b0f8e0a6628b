"""Ranks measure their link alone in turn and then together; none waits for ever for one that cannot."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from builders import links

from scripts.harness.patience import patience
from sglang_uvm_offload.memory.kept_links import kept
from sglang_uvm_offload.memory.link import TIMED
from sglang_uvm_offload.plugin.rank import link
from sglang_uvm_offload.plugin.rank.backend import Cuda, Emulated

pytestmark = pytest.mark.sglang

BLOCKS = np.array([2 << 20], dtype=np.int64)


class World:
    """Ranks as threads, with what SGLang's group of all ranks has."""

    def __init__(self, size):
        self.world_size = size
        self._barrier = threading.Barrier(size)
        self._told = [None] * size
        self._rank = threading.local()

    @property
    def rank_in_group(self):
        return self._rank.number

    def barrier(self):
        self._barrier.wait(patience(20))

    def all_gather_object(self, own):
        self._told[self.rank_in_group] = own
        self.barrier()
        return list(self._told)

    def run(self, rank, call):
        self._rank.number = rank
        return call()


class Timer:
    """Rates that depend on who else times at the moment. ``fails``: the number of the call that raises."""

    def __init__(self, busy, alone, together, fails=None):
        self.busy, self.alone, self.together, self.fails = busy, alone, together, fails
        self.calls = 0
        self.beside = []
        self.closed = False

    def close(self):
        self.closed = True

    def rates(self, seconds, wait):
        self.calls += 1
        for _ in range(TIMED):
            wait()
            self.busy.add(self)
            if self.calls == self.fails:
                self.busy.discard(self)
                raise RuntimeError("no VRAM")
        if self.calls == 1:
            time.sleep(0.02)  # for those that do not wait for their turn
        self.beside.append(len(self.busy))
        if self.calls > 1:
            return self.together
        self.busy.discard(self)
        return self.alone


def measured_by(monkeypatch, tmp_path, timers, hosts=None, gpus=None, ids=lambda devices: [f"gpu {devices[0]}"]):
    """What each rank measures; None in ``timers``: it has nothing offloaded."""
    h200s = [("NVIDIA H200", 150 << 30)] * len(timers)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world = World(len(timers))
    monkeypatch.setattr(link, "get_world_group", lambda: world)
    monkeypatch.setattr(link, "gpu_ids", ids)
    monkeypatch.setattr(link, "visible_gpus", gpus or (lambda: h200s))
    monkeypatch.setattr(link, "_host", lambda: (hosts or [""] * len(timers))[world.rank_in_group])
    monkeypatch.setattr(Cuda, "link_timer", lambda self, offloaded: timers[self._gpu])
    tensor = SimpleNamespace(offloaded_blocks=lambda: BLOCKS, layout=SimpleNamespace(expert_bytes=1 << 20))

    def one(rank):
        layers = [] if timers[rank] is None else [SimpleNamespace(tensors=[tensor])]
        return world.run(rank, lambda: link.measure(Cuda(rank), rank, layers))

    with ThreadPoolExecutor(len(timers)) as threads:
        return list(threads.map(one, range(len(timers))))


def of_four(busy, **more):
    fast, slow = links.rates(), links.rates(scattered=35.0)
    return [Timer(busy, fast, slow, **more) for _ in range(4)]


def test_each_is_alone_in_its_turn_and_then_all_are_together(monkeypatch, tmp_path):
    timers = of_four(set())
    found = measured_by(monkeypatch, tmp_path, timers)
    assert [timer.beside for timer in timers] == [[1, 4]] * 4
    assert all(timer.closed for timer in timers)
    assert found[0].measured == links.measured(4, links.rates(), scattered=35.0)
    assert found == [found[0]] * 4


@pytest.mark.parametrize("fails", [1, 2])
def test_a_rank_that_fails_holds_up_nobody_and_is_left_out(monkeypatch, tmp_path, caplog, fails):
    timers = of_four(set())
    timers[0].fails = fails
    found = measured_by(monkeypatch, tmp_path, timers)
    assert [status.measured.ranks for status in found] == [3] * 4
    assert "cannot measure the link: no VRAM" in caplog.text


def test_nothing_is_measured_where_no_rank_can(monkeypatch, tmp_path):
    assert measured_by(monkeypatch, tmp_path, [None, None]) == [None, None]
    assert kept(["gpu 0", "gpu 1"], 2) is None


def test_each_machine_has_its_own_link(monkeypatch, tmp_path):
    timers = of_four(set())
    for timer in timers[2:]:
        timer.together = links.rates(scattered=20.0)
    found = measured_by(monkeypatch, tmp_path, timers, hosts=["a", "a", "b", "b"])
    assert [(status.measured.ranks, status.measured.together.scattered) for status in found] == [(2, 35.0)] * 2 + [
        (2, 20.0)
    ] * 2


def test_what_was_measured_is_told_once_and_kept(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO")
    (found, *_) = measured_by(monkeypatch, tmp_path, of_four(set()))
    assert caplog.text.count("this machine reads offloaded experts at 35.0 GB/s, 51.7 expected: scattered reads 35.0") == 1
    assert caplog.text.count("slow: 4 GPUs share the 50.0 GB/s that one alone reads") == 1
    assert kept([f"gpu {rank}" for rank in range(4)], 4).link == found.measured


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H200", 55 * 0.94), ("NVIDIA Thing", 0), (None, 0)])
def test_what_is_expected_is_that_of_the_gpu_where_it_is_known(monkeypatch, tmp_path, name, expected):
    """None: the driver shows no GPU."""
    monkeypatch.setattr(link, "visible_gpus", lambda: [(name, 150 << 30)] if name else [])
    timer = Timer(set(), links.rates(), None)
    (found,) = measured_by(monkeypatch, tmp_path, [timer], gpus=link.visible_gpus)
    assert found.expected == pytest.approx(expected)


def test_a_driver_that_names_no_gpu_holds_up_nobody(monkeypatch, tmp_path):
    def refuses(devices):
        raise link.DriverError("no")

    found = measured_by(monkeypatch, tmp_path, of_four(set()), ids=refuses)
    assert [status.measured.ranks for status in found] == [4] * 4


def test_a_cache_that_cannot_be_written_only_warns(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    (found,) = measured_by(monkeypatch, tmp_path / "file", [Timer(set(), links.rates(), None)])
    assert found.measured.ranks == 1
    assert "cannot save the measured link for later launches" in caplog.text


def test_a_cpu_measures_nothing_and_waits_for_nobody(monkeypatch):
    monkeypatch.setattr(link, "get_world_group", lambda: pytest.fail("a collective on a CPU server"))
    assert link.measure(Emulated(), 0, []) is None

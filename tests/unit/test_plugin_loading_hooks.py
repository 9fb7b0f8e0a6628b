"""What is over when a model is loaded, and how a load that fails ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders.configs import requested_config
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.runtime_context import get_parallel
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, Memory, Span
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.rank import loading_hooks
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.rank.loading_hooks import LoadingHooks
from sglang_uvm_offload.plugin.rank.state import RankState
from sglang_uvm_offload.residency.model import ModelExperts

pytestmark = pytest.mark.sglang


class Backend(Emulated):
    def __init__(self, memory: Memory):
        self._memory = memory

    def memory(self) -> Memory:
        return self._memory


def load(
    monkeypatch: pytest.MonkeyPatch,
    memory: Memory,
    model: Callable[[LoadingHooks], None],
    measure: Callable[[], None] = lambda: None,
    place: Callable[..., None] = lambda *_: None,
    slots: int = 2,
) -> None:
    """Loads what ``model`` builds and reads, and then measures the link. ``place`` is given the built model."""
    rank = RankState(requested_config(num_resident=1, slots=slots))
    rank.backend = Backend(memory)
    hooks = LoadingHooks(rank)
    monkeypatch.setattr(hooks, "_place_target", lambda runner, model, module: place(model))
    monkeypatch.setattr(hooks, "_loaded", lambda model, module: None)
    monkeypatch.setattr(loading_hooks, "get_device", lambda: SimpleNamespace(gpu_id=0))
    monkeypatch.setattr(loading_hooks.link, "measure", lambda *_: measure())
    with get_parallel().override(tp_rank=0, pp_rank=0):
        hooks.around_load_model(lambda runner: model(hooks), SimpleNamespace(is_draft_worker=False, model=torch.nn.Module()))


def test_host_pages_are_populated_while_the_model_loads_and_before_the_link_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SimulatedDriver()
    managed = memory.allocate(2 * BLOCK_BYTES, "w13")
    whole, found = Span(0, 2 * BLOCK_BYTES), []

    def build(hooks: LoadingHooks) -> None:
        memory.populate(managed, [whole])
        found.append(memory.location(managed, whole))

    load(monkeypatch, memory, build, lambda: found.append(memory.location(managed, whole)))
    assert found == [None, Location.HOST]
    later = memory.allocate(BLOCK_BYTES, "of a weight update")
    memory.populate(later, [Span(0, BLOCK_BYTES)])
    assert memory.location(later, Span(0, BLOCK_BYTES)) is Location.HOST, "at once again"


def test_pages_are_populated_before_an_experts_weight_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's own loader. Those of other tensors may wait."""
    memory, found = SimulatedDriver(), []
    first, second = (memory.allocate(BLOCK_BYTES, name) for name in ("w13", "w2"))
    whole = Span(0, BLOCK_BYTES)

    def build(hooks: LoadingHooks) -> None:
        for managed in (first, second):
            memory.populate(managed, [whole])
        for param in (torch.zeros(4), memory.tensor(second)[64:128]):
            hooks.before_weight(object(), param, torch.ones(64), "experts.0.down_proj", shard_id="w2", expert_id=0)
            found.append([memory.location(managed, whole) for managed in (first, second)])

    load(monkeypatch, memory, build, lambda: None)
    assert found == [[None, None], [None, Location.HOST]]


@pytest.mark.parametrize(("load_format", "left"), [("auto", None), ("safetensors", None), ("dummy", Location.HOST)])
def test_a_loader_that_fills_a_built_model_as_a_whole_finds_its_pages(
    monkeypatch: pytest.MonkeyPatch, load_format: str, left: Location | None
) -> None:
    memory, found = SimulatedDriver(), []
    managed = memory.allocate(BLOCK_BYTES, "w13")

    def build(*_: object) -> torch.nn.Module:
        memory.populate(managed, [Span(0, BLOCK_BYTES)])
        return torch.nn.Linear(1, 1)

    def model(hooks: LoadingHooks) -> None:
        hooks.around_build(build, None, LoadConfig(load_format=load_format))
        found.append(memory.location(managed, Span(0, BLOCK_BYTES)))

    load(monkeypatch, memory, model, lambda: None)
    assert found == [left]


@pytest.mark.parametrize("calls", [1, 2])
def test_what_a_model_writes_while_it_is_built_is_there_once_its_tensors_are_in_their_pool(
    monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """A loader may build and read in one call, or in two, of which the first one is watched."""
    module: Any = torch.nn.Module()

    def build(hooks: LoadingHooks) -> torch.nn.Module:
        into = hooks.rank.layer_hooks._into
        assert into is not None
        manager, model = into
        experts = model.add_layer(manager.memory, LayerShard(0, 4))
        with AllocationMode(4, experts.allocate, experts.write):
            module.w13, module.w2 = (torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8) for _ in range(2))
        experts.sync_tensors(module)
        torch.neg(torch.ones(BLOCK_BYTES, dtype=torch.uint8), out=module.w13[2])
        return module

    def both(hooks: LoadingHooks) -> None:
        if calls == 1:
            build(hooks)
        else:
            hooks.around_build(lambda *_: build(hooks), None, LoadConfig())

    def place(model: ModelExperts) -> None:
        (experts,) = model.layers
        assert [tensor.written for tensor in experts.tensors] == ([True, False] if calls == 2 else [True, True])
        experts.join_pool(partial(model.pool_for, experts))
        experts.place(lambda layout: layout.holding(np.arange(4) < 1), num_slots=2)
        assert experts.pool is not None

    load(monkeypatch, SimulatedDriver(), both, place=place)
    assert module.w13[:, -1].tolist() == [0, 0, 255, 0]
    assert not module.w2.any()


def test_the_build_of_a_model_without_slots_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves once it is built, and a watch slows all that it does."""
    watched: list[int] = []
    for slots in (2, 0):
        monkeypatch.setattr(loading_hooks, "WatchWrites", lambda _, slots=slots: nullcontext(watched.append(slots)))
        build = partial(LoadingHooks.around_build, original=lambda *_: torch.nn.Module())
        load(
            monkeypatch,
            SimulatedDriver(),
            lambda hooks, build=build: build(hooks, model_config=None, load_config=LoadConfig()),
            slots=slots,
        )
    assert watched == [2]


@contextmanager
def _then(at_the_end: Callable[[], None]) -> Iterator[None]:
    yield
    at_the_end()


def test_pages_that_cannot_be_populated_end_the_launch_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def fail() -> None:
        raise ManagedMemoryError("cudaMemPrefetchAsync to host", "w13 of MoE layer 3", Span(0, 8), "out of memory")

    class Full(EmulatedMemory):
        def loading(self) -> Any:
            return _then(fail)

    def end(message: str) -> None:
        told.append(message)
        raise SystemExit

    monkeypatch.setattr(enforce, "end", end)
    with pytest.raises(SystemExit):
        load(monkeypatch, Full(), lambda rank: None, lambda: told.append("measured"))
    (message,) = told
    assert "w13 of MoE layer 3" in message


def test_a_load_that_fails_shows_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimulatedDriver()
    managed = memory.allocate(BLOCK_BYTES, "w13")

    def build(hooks: LoadingHooks) -> None:
        memory.populate(managed, [Span(0, BLOCK_BYTES)])
        raise KeyError("w13_weight")

    with pytest.raises(KeyError, match="w13_weight"):
        load(monkeypatch, memory, build, lambda: None)
    assert memory.traffic.prefetch_calls == 0

"""Continuous adaptation through the manager: residents follow the traffic, pay for their moves, and stop at a fault."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_manager import LAYERS, E, Rank, config

from sglang_uvm_offload.adaptation import INTERVAL_STEPS
from sglang_uvm_offload.manager import MOVE_BYTES_PER_S
from sglang_uvm_offload.uvm import Location, MemoryFault
from sglang_uvm_offload.uvm_host import HostMemory


def following(memory=None, **flags) -> Rank:
    rank = Rank(config(resident_selection="first_n", adapt="continuous", **flags), memory)
    seconds = iter(range(10**9))
    rank.manager.clock = lambda: float(next(seconds))
    return rank


def serve(rank: Rank, ids, steps: int) -> None:
    for _ in range(steps):
        rank.step(ids)


def test_residents_follow_traffic_that_changes():
    rank = following()
    serve(rank, [[5, 6, 7]], 40 * INTERVAL_STEPS)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    serve(rank, [[1, 2, 3]], 80 * INTERVAL_STEPS)
    assert rank.resident() == [[1, 2, 3]] * LAYERS


def test_all_equal_routing_moves_nothing():
    rank = following()
    serve(rank, [[expert] for expert in range(E)], 100 * INTERVAL_STEPS)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    assert rank.manager.ledger.moves == 0


def test_idle_and_dummy_steps_change_nothing():
    rank = following()
    serve(rank, [[5, 6, 7]], 40 * INTERVAL_STEPS)
    moves = rank.manager.ledger.moves
    for _ in range(50 * INTERVAL_STEPS):
        rank.manager.begin_step(rank.model, 0, 0, 1)
        rank.manager.end_step(rank.model)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    assert rank.manager.ledger.moves == moves


def test_global_gives_room_to_the_layer_that_saves_more_and_keeps_the_budget():
    rank = following(per_layer="global")
    wide = {0: [[2, 3, 4, 5, 6, 7]], 1: [[0, 0, 0, 0, 0, 0]], 2: [[1, 1, 1, 1, 1, 1]]}
    serve(rank, wide, 100 * INTERVAL_STEPS)
    sizes = [len(ids) for ids in rank.resident()]
    assert sum(sizes) <= 3 * LAYERS
    assert sizes[0] > 3
    assert 0 in rank.resident()[1]
    assert 1 in rank.resident()[2]


def test_uniform_keeps_as_many_in_each_layer():
    rank = following()
    serve(rank, {0: [[2, 3, 4, 5, 6, 7]], 1: [[0] * 6], 2: [[1] * 6]}, 100 * INTERVAL_STEPS)
    assert [len(ids) for ids in rank.resident()] == [3] * LAYERS


def test_vram_never_holds_more_than_at_load():
    class Watched(HostMemory):
        limit = 10**12

        def prefetch(self, managed, spans, location):
            super().prefetch(managed, spans, location)
            assert self.device_used <= self.limit

    memory = Watched()
    rank = following(memory, per_layer="global")
    memory.limit = memory.device_used
    rng = np.random.default_rng(0)
    for _ in range(12):
        hot = {layer: [rng.choice(E, 4, replace=False).tolist()] for layer in range(LAYERS)}
        serve(rank, hot, 12 * INTERVAL_STEPS)
    assert rank.manager.ledger.moves > 10


def test_bytes_and_addresses_stay():
    rank = following()
    for module in rank.modules:
        module.w13.copy_(torch.randint(0, 255, module.w13.shape, dtype=torch.uint8))
    before = [(module.w13.data_ptr(), module.w13.clone()) for module in rank.modules]
    serve(rank, [[5, 6, 7]], 40 * INTERVAL_STEPS)
    for module, (address, value) in zip(rank.modules, before, strict=True):
        assert module.w13.data_ptr() == address
        assert torch.equal(module.w13, value)


def test_moves_wait_while_the_link_has_no_time_for_them():
    rank = following()
    rank.manager.clock = lambda: 0.0
    serve(rank, [[5, 6, 7]], 40 * INTERVAL_STEPS)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    assert MOVE_BYTES_PER_S > 0


@pytest.mark.parametrize("late", [False, True])
def test_a_fault_stops_moving_and_not_serving(late, caplog):
    class Failing(HostMemory):
        armed = False

        def prefetch(self, managed, spans, location):
            if self.armed and not late and location is Location.DEVICE:
                raise MemoryFault("prefetch", managed.name, spans[0], "injected")
            super().prefetch(managed, spans, location)

        def synchronize(self):
            if self.armed and late:
                raise MemoryFault("synchronize", "the moves so far", self.span, "injected")

    memory = Failing()
    rank = following(memory)
    memory.span = rank.model.layers[0].tensors[0].layout.spans(np.ones(E, dtype=bool))[0]
    memory.armed = True
    serve(rank, [[5, 6, 7]], 60 * INTERVAL_STEPS)
    assert "injected" in rank.manager.status()["fault"]
    assert len([r for r in caplog.records if "moving experts stopped" in r.getMessage()]) == 1
    for layer in rank.model.layers:
        for tensor in layer.tensors:
            assert (tensor.resident() >= layer.resident).all(), "an expert is taken for resident that is not"


def test_a_rank_with_a_fault_still_agrees_with_its_peers_and_moves_nothing():
    rank = following()
    asked = []
    rank.manager.agree = lambda decide: (asked.append(1), decide())[1]
    rank.manager.fault = "injected"
    serve(rank, [[5, 6, 7]], 40 * INTERVAL_STEPS)
    assert len(asked) == 40
    assert rank.resident() == [[0, 1, 2]] * LAYERS


def test_frequency_follows_from_the_warmup_on():
    rank = Rank(config(adapt="continuous", warmup_tokens=4 * INTERVAL_STEPS))
    seconds = iter(range(10**9))
    rank.manager.clock = lambda: float(next(seconds))
    serve(rank, [[5, 6, 7]], 4 * INTERVAL_STEPS)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    serve(rank, [[5, 6, 7]], 1)
    assert rank.resident() == [[5, 6, 7]] * LAYERS
    serve(rank, [[1, 2, 3]], 80 * INTERVAL_STEPS)
    assert rank.resident() == [[1, 2, 3]] * LAYERS

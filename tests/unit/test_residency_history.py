"""What a run remembers of its past: samples that stay bounded and lose no bytes, and what other budgets would have covered."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from builders.managers import LAYERS, Rank, config, placed_layer

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.residency import history
from sglang_uvm_offload.residency.history import Past, hit_rate_curve
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, Phase, RoutingCounts


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def rank_at(clock: Clock) -> Rank:
    """A rank whose history goes by ``clock``."""
    return Rank(config(resident_selection="first_n"), clock=clock)


def columns(rank: Rank) -> dict[str, list[float]]:
    return rank.status()["history"]


def test_samples_are_taken_between_steps_at_most_once_an_interval():
    clock = Clock()
    rank = rank_at(clock)
    for _ in range(40):
        clock.now += 0.1
        rank.step([[0, 7]])
        rank.manager.poll_if_due()
    past = columns(rank)
    assert past["seconds"][0] == 0
    assert 4 <= len(past["seconds"]) <= 6, "not about one a second"
    assert past["seconds"][-1] == pytest.approx(4.0)
    assert past["steps"][-1] == past["tokens"][-1] == 40
    assert past["routed"][-1] == 2 * 40 * LAYERS
    assert past["routed_resident"][-1] == 40 * LAYERS
    assert past["zero_copy_bytes"][-1] == 40 * LAYERS * PAGE_BYTES


def test_a_history_stays_bounded_and_covers_the_whole_run(monkeypatch):
    monkeypatch.setattr(history, "MAX_SAMPLES", 16)
    clock = Clock()
    rank = rank_at(clock)
    for _ in range(1000):
        clock.now += 1
        rank.step([[7]])
        rank.manager.poll_if_due()
    seconds = columns(rank)["seconds"]
    assert 8 < len(seconds) <= 17
    assert (seconds[0], seconds[-1]) == (0, 1000)
    gaps = np.diff(seconds[:-1])
    assert gaps.max() <= 4 * gaps.min(), f"thinned unevenly: {gaps}"
    assert columns(rank)["steps"] == pytest.approx(seconds), "a sample does not hold the steps of its time"


def test_idleness_brings_the_last_steps_in_and_then_looks_no_more():
    clock = Clock()
    rank = rank_at(clock)
    rank.step([[7]])
    clock.now += 2
    rank.manager.poll_when_idle()
    assert rank.manager.ledger.steps == 1
    rank.manager.ledger.poll = lambda: pytest.fail("looked again though nothing happened")
    rank.manager.poll_when_idle()


def test_streamed_bytes_are_in_the_status_of_each_layer_and_in_the_history():
    clock = Clock()
    rank = rank_at(clock)
    rank.step([[0, 7]], phase=Phase.PREFILL, streams=True)
    rank.manager.ledger.add_streamed(1, 5 * PAGE_BYTES)
    clock.now += 1
    rank.manager.poll_if_due()
    rank.step([[0, 7]], phase=Phase.PREFILL, streams=True)
    rank.manager.ledger.add_streamed(2, 3 * PAGE_BYTES)
    status = rank.status()
    assert status["streamed_bytes"] == 8 * PAGE_BYTES
    assert [layer["streamed_bytes"] for layer in status["layers"]] == [0, 5 * PAGE_BYTES, 3 * PAGE_BYTES]
    assert status["history"]["streamed_bytes"] == [0, 5 * PAGE_BYTES, 8 * PAGE_BYTES]
    assert status["history"]["zero_copy_bytes"] == [0, 0, 0]


def model_of(activations: list[list[int]], *, pages_of=(1,), shared: int = 0, resident=(0,), block=1) -> ModelExperts:
    """A layer for each row of ``activations``, with experts of ``pages_of`` pages (0: in plain VRAM) in blocks of ``block``."""
    width, memory = len(activations[0]), EmulatedMemory(block * PAGE_BYTES)
    model = ModelExperts(draft=False)
    for index, pages in enumerate(np.resize(pages_of, len(activations)).tolist()):
        whole = np.isin(np.arange(width), resident)
        layer = placed_layer(memory, LayerShard(index, width, shared), lambda layout, whole=whole: layout.holding(whole))
        model.layers.append(layer)
        HELD.append(layer.allocate(pages * PAGE_BYTES, torch.device("cpu"), "w13"))
    return model


HELD: list[torch.Tensor | None] = []
"""Keeps the models' memory."""


def counts_of(activations: list[list[int]], prefill: int = 0) -> RoutingCounts:
    counts = np.zeros((len(activations), 2, 2, len(activations[0])), dtype=np.int64)
    counts[:, Phase.DECODE, ACTIVATIONS] = activations
    counts[:, Phase.DECODE, ROUTED] = 1000  # tokens are not what costs a read
    counts[:, Phase.PREFILL] = prefill
    return RoutingCounts(counts, (3, 50))


def curve_of(activations, **layers):
    return msgspec.to_builtins(hit_rate_curve(counts_of(activations, prefill=77), model_of(activations, **layers)))


def test_the_curve_is_the_share_that_the_best_residents_of_each_layer_would_have_covered():
    curve = curve_of([[0, 6, 1, 3], [5, 5, 0, 0]])
    assert curve["residents"] == [0, 1, 2, 3, 4]
    assert curve["uniform"] == pytest.approx([0, 11 / 20, 19 / 20, 1, 1])
    assert (curve["activations"], curve["decode_steps"]) == (20, 50)


def test_one_ranking_of_all_layers_covers_more_where_layers_differ():
    curve = curve_of([[40, 30, 20, 10], [1, 1, 1, 1]])
    assert curve["uniform"][1] == pytest.approx(41 / 104)
    assert curve["global"] == pytest.approx([0, 70 / 104, 100 / 104, 102 / 104, 1])


def test_one_ranking_spends_bytes_not_experts():
    curve = curve_of([[10, 9], [8, 7]], pages_of=(3, 1))
    assert curve["global"] == pytest.approx([0, 10 / 34, 1]), "4 blocks hold the first expert of 3, then one of 1"


def test_the_curve_is_of_blocks_where_experts_share_them():
    """Experts of one and a half blocks: 0 | 0 1 | 1 | 2 | 2 3 | 3. One of them takes two blocks, two take three."""
    curve = curve_of([[0, 3, 6, 0]], pages_of=(3,), block=2)
    best = [0, 4 + 2, 4 + 2 + 2, 9, 9]
    assert curve["uniform"] == curve["global"] == pytest.approx([n / 9 for n in best])
    assert curve["present"] == pytest.approx(1 / 9), "a third of expert 1 is beside expert 0"


def test_always_resident_experts_and_layers_in_plain_vram_are_apart():
    with_shared = curve_of([[6, 2, 50], [1, 1, 50]], shared=1, resident=(0, 2))
    assert with_shared["residents"] == [0, 1, 2]
    assert with_shared["uniform"] == pytest.approx([0, 0.7, 1])
    assert with_shared["present"] == pytest.approx(0.7)
    with_plain = curve_of([[6, 2], [100, 100]], pages_of=(1, 0))
    assert with_plain["uniform"] == with_plain["global"] == pytest.approx([0, 0.75, 1])


def test_a_large_model_has_about_twenty_points_up_to_all_experts():
    rng = np.random.default_rng(0)
    activations = rng.integers(0, 1000, (75, 256)).tolist()
    curve = curve_of(activations)
    assert 20 <= len(curve["residents"]) <= 22
    assert (curve["residents"][0], curve["residents"][-1]) == (0, 256)
    for name in ("uniform", "global"):
        assert (np.diff(curve[name]) > 0).all()
        assert (curve[name][0], curve[name][-1]) == (0, 1)
    assert (np.array(curve["global"]) >= np.array(curve["uniform"])).all()


def test_rates_are_flat_between_samples_and_unknown_where_nothing_happened():
    columns = {name: [0, 10, 10, 30] for name in Past.__struct_fields__}
    past = Past(**columns | {"seconds": [0.0, 1.0, 2.0, 4.0], "moves": [0, 5, 5, 6]})
    assert past.rates("moves", "steps") == [(0, 0.5), (1, 0.5), (1, None), (2, None), (2, 0.05), (4, 0.05)]


def test_without_decode_there_is_no_curve():
    assert curve_of([[0, 0]]) is None

"""Predicting a layer's misses from the layer before: what can be learned is, what cannot is at chance, and nobody peeks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from builders.traces import trace
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.replay.recall import PREDICTORS, VOLUMES, Prefetcher, Recall, recalls
from sglang_uvm_offload.replay.simulator import recall_of_misses, replay
from sglang_uvm_offload.routing.trace import Trace

STEPS, WARMUP = 600, 300


def activated(ids: np.ndarray, experts: int) -> np.ndarray:
    """``bool[steps, layers, experts]`` of ``ids[steps, layers, k]``."""
    return (ids[..., None] == np.arange(experts)).any(axis=2)


def scored(steps: np.ndarray, resident: np.ndarray) -> dict[tuple[str, float], Recall]:
    """Every predictor and volume, with the same residents in each step."""
    found = recalls(((step, resident) for step in steps), resident.shape, WARMUP)
    return {(one.predictor, one.volume): one for one in found}


def brought(steps: np.ndarray, resident: np.ndarray, predictor: str) -> np.ndarray:
    """``bool[steps, volumes, layers - 1, experts]``"""
    shape = (steps.shape[1], steps.shape[2])
    prefetcher = Prefetcher(shape, PREDICTORS[predictor](shape))
    return np.stack([prefetcher.step(*now) for now in zip(steps, resident, strict=True)])


@pytest.fixture(scope="module")
def determined() -> np.ndarray:
    """Layers whose expert follows from that of the layer before: 16 experts of 32, one a layer."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 16, STEPS)]
    for _ in range(2):
        ids.append(rng.permutation(16)[ids[-1]])
    return activated(np.stack(ids, axis=1)[:, :, None], 32)


def test_a_layer_that_follows_from_the_one_before_is_predicted_whole(determined):
    unused = np.broadcast_to(np.arange(32) >= 16, (3, 32))
    found = scored(determined, unused)
    assert found["layer before", 1].missed_per_step == found["layer before", 1].brought_per_step == 2
    assert found["layer before", 1].recall == 1
    assert found["frequency", 1].chance == pytest.approx(1 / 16)
    assert found["frequency", 1].recall == pytest.approx(1 / 16, abs=0.04)
    assert found["frequency", 2].recall == pytest.approx(2 / 16, abs=0.05)


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_random_routing_is_predicted_by_chance_alone(predictor):
    rng = np.random.default_rng(1)
    steps = rng.random((STEPS, 4, 32)) < 0.25
    found = scored(steps, np.broadcast_to(np.arange(32) < 8, (4, 32)))
    for volume in VOLUMES:
        one = found[predictor, volume]
        assert one.brought_per_step == pytest.approx(volume * one.missed_per_step, rel=0.03)
        assert one.chance == pytest.approx(volume * one.missed_per_step / (3 * 24), rel=0.03)
        assert one.recall == pytest.approx(one.chance, abs=0.03)


def test_what_a_layer_does_not_activate_tells_too():
    """Layer 0 activates expert 0 half of the time; layer 1 activates expert 1 when it does not, else expert 0."""
    first = np.random.default_rng(2).random(STEPS) < 0.5
    steps = np.zeros((STEPS, 2, 4), dtype=bool)
    steps[:, 0, 0] = first
    steps[:, 1, 0], steps[:, 1, 1] = first, ~first
    assert scored(steps, np.zeros((2, 4), dtype=bool))["layer before", 1].recall == 1


@pytest.mark.parametrize("predictor", PREDICTORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(1, 39), layer=st.integers(1, 3))
def test_neither_later_steps_nor_later_layers_change_a_prediction(predictor, seed, cut, layer):
    rng = np.random.default_rng(seed)
    steps, resident = rng.random((40, 4, 8)) < 0.3, rng.random((40, 4, 8)) < 0.5
    before = brought(steps, resident, predictor)
    shuffled = np.concatenate([steps[:cut], rng.permutation(steps[cut:])])
    # In the step at the cut, the experts of this layer and later ones are unknown when this layer is predicted.
    shuffled[cut, :layer] = steps[cut, :layer]
    after = brought(shuffled, resident, predictor)
    assert (after[:cut] == before[:cut]).all()
    assert (after[cut, :, :layer] == before[cut, :, :layer]).all()


@pytest.mark.parametrize("predictor", PREDICTORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_residents_are_never_brought_and_no_more_than_the_volume(predictor, seed, share):
    rng = np.random.default_rng(seed)
    steps, resident = rng.random((60, 3, 8)) < 0.3, rng.random((60, 3, 8)) < share
    found = brought(steps, resident, predictor)
    assert not (found & resident[:, None, 1:]).any()
    missed = np.count_nonzero(steps[:, 1:] & ~resident[:, 1:], axis=2)
    mean = np.cumsum(missed, axis=0) / np.arange(1, 61)[:, None]  # 60 steps are within the window
    for volume, of_volume in zip(VOLUMES, np.moveaxis(found, 1, 0), strict=True):
        assert (of_volume.sum(axis=(0, 2)) <= volume * mean[:-1].sum(axis=0) + 0.5 + 1e-9).all()


def hot_first_layer() -> Trace:
    """The first layer uses expert 0 alone, which is always resident; in two others each request uses four of 16, so residents
    move."""
    ids = np.random.default_rng(3).integers(0, 4, (800, 3, 2)) + 4 * (np.arange(800) // 100 % 4)[:, None, None]
    ids[:, 0] = 0
    return Trace(ids, np.full(8, 100), 16)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_the_misses_are_those_of_the_shipped_policy(batch):
    served = replay(hot_first_layer(), "adaptive", 0.5, batch, expert_bytes=1)
    missed = served.read_bytes_per_step
    assert missed > 0
    assert served.moves_per_step > 0
    for one in recall_of_misses(hot_first_layer(), 0.5, batch):
        assert one.missed_per_step == pytest.approx(missed)


@pytest.fixture
def saved(tmp_path):
    hot_first_layer().save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


@pytest.mark.slow
def test_the_command_prints_each_predictor_at_each_volume(saved, capsys):
    assert main(["replay", str(saved), "--residency", "0.5", "--recall"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert main(["replay", str(saved), "--residency", "0.5", "--recall", "--policy", "adaptive", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["recall"]
    assert [(one["predictor"], one["volume"]) for one in found] == [(name, v) for name in PREDICTORS for v in VOLUMES]
    for line, one in zip(lines[1:], found, strict=True):
        assert one["predictor"] in line
        assert f"{100 * one['recall']:.1f} %" in line


@pytest.mark.slow
def test_all_experts_in_vram_miss_nothing(saved, capsys):
    assert main(["replay", str(saved), "--residency", "1", "--recall", "--json"]) == 0
    for one in json.loads(capsys.readouterr().out)["recall"]:
        assert (one["recall"], one["chance"], one["missed_per_step"], one["brought_per_step"]) == (0, 0, 0, 0)


def test_the_recall_of_another_policy_is_refused(saved, capsys):
    assert main(["replay", str(saved), "--residency", "0.5", "--recall", "--policy", "lru"]) == 2
    assert "--recall covers only the misses of adaptive; remove --policy" in capsys.readouterr().err


def test_a_trace_of_one_layer_has_no_next_one(tmp_path, capsys):
    trace([0, 1], [1, 0]).save(tmp_path / "one.npz")
    assert main(["replay", str(tmp_path / "one.npz"), "--residency", "0.5", "--recall"]) == 2
    assert "one MoE layer has no next layer" in capsys.readouterr().err

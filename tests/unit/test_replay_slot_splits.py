"""Slots on traces small enough to follow by hand, and the sweep over splits of the VRAM."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from builders.law import Law
from builders.profiles import MODEL, some
from builders.profiles import saved as saved_profile
from builders.traces import trace

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.replay import simulator
from sglang_uvm_offload.replay.policies import SLOTS
from sglang_uvm_offload.replay.results import Split
from sglang_uvm_offload.replay.simulator import Workload, replay, slot_splits
from sglang_uvm_offload.replay.slot_splits import SHARES, SlotCache, best_split
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.routing.trace import Trace

MIB = 1 << 20


def of(*ids: int) -> np.ndarray:
    return np.isin(np.arange(6), ids)[None]


@pytest.mark.parametrize(
    ("slots", "residents", "steps"),
    [  # each with the experts used, hit, read in place and filled
        (2, [], [([0, 4], [], [], [0, 4]), ([0, 4], [0, 4], [], []), ([4, 5], [4], [], [5])]),
        (2, [], [([0, 1, 2], [], [2], [0, 1]), ([0, 1, 2], [0, 1], [2], [])]),
        (0, [], [([3], [], [3], [])] * 2),
        (1, [0, 1], [([0, 1, 2], [0, 1], [], [2]), ([0, 3], [0], [], [3]), ([1, 3], [1, 3], [], [])]),
    ],
)
def test_a_miss_fills_a_slot_or_is_read_in_place_and_then_hits(slots, residents, steps):
    cache = SlotCache((1, 6), slots, of(*residents))
    for used, *expected in steps:
        served = cache.step(of(*used))
        assert [np.flatnonzero(each[0]).tolist() for each in (served.hit, served.read, served.moved)] == expected


@pytest.mark.parametrize("slots", [0, 3, 8])
def test_a_miss_crosses_the_link_once_and_residents_never_do(slots):
    rng = np.random.default_rng(0)
    fixed = rng.random((3, 8)) < 0.25
    cache = SlotCache((3, 8), slots, fixed)
    for _ in range(200):
        activated, before = rng.random((3, 8)) < 0.3, cache.resident
        served = cache.step(activated)
        assert np.array_equal(served.hit.astype(int) + served.read + served.moved, activated), "one of them"
        assert (served.hit <= activated & before).all()
        assert (activated & fixed <= served.hit).all()
        assert (cache.resident & ~before <= served.moved).all()
        assert (cache.resident | ~fixed).all()
        assert (cache.resident & ~fixed).sum() <= slots * 3


def test_a_layer_may_take_the_rows_of_another():
    cache = SlotCache((2, 6), 2, np.zeros((2, 6), dtype=bool))
    for expected in ([], [0, 2, 4, 5]):
        assert np.flatnonzero(cache.step(np.array([of(0, 2, 4, 5)[0], of()[0]])).hit[0]).tolist() == expected


@pytest.fixture(scope="module")
def mixed() -> Trace:
    """Four requests of 150 tokens in 2 layers of 16 experts: one is always hot, the other three of a token are of six that the
    request changes."""
    rng = np.random.default_rng(1)
    of_request = np.stack([rng.permutation(np.arange(1, 16))[:6] for _ in range(4)])
    picks = np.stack([of_request[token // 150][rng.permutation(6)[:3]] for token in range(600)])
    ids = np.concatenate([np.zeros((600, 1), dtype=int), picks], axis=1)
    return Trace(np.stack([ids, (ids + 3) % 16], axis=1), np.full(4, 150), 16)


@pytest.mark.slow
def test_a_sweep_splits_the_rows_from_none_to_all_in_slots(mixed):
    splits = slot_splits(mixed, 0.5, batch=2, expert_bytes=MIB, link_gbps=2)
    assert [split.slot_share for split in splits] == list(SHARES)
    assert [(split.residents, split.slots) for split in splits] == [(8 - slots, slots) for slots in (0, 2, 4, 6, 8)]
    scored = Workload.of(mixed, 2).scored
    for split in splits:
        crossings = (split.read_bytes_per_step + split.filled_bytes_per_step) / MIB
        assert crossings == pytest.approx(scored.sum() / len(scored) * (1 - split.hit_rate))
        assert split.filled_bytes_per_step == pytest.approx(MIB * split.fills_per_step)
        assert split.step_seconds == pytest.approx(crossings * MIB / 2e9)
    for split, name in ((splits[0], "static"), (splits[-1], SLOTS)):
        alone = replay(mixed, name, 0.5, batch=2)
        assert (split.hit_rate, split.fills_per_step) == (alone.hit_rate, alone.moves_per_step)


def test_residents_are_the_most_activated_of_the_warm_up():
    """3 is hot before, 0 and 1 by turns after: a resident 3 serves nothing, a slot does."""
    served = trace([3, 3, 3, 2], [0, 0, 1, 1])
    none, half, whole = (s for s in slot_splits(served, 0.5) if s.slot_share in (0, 0.5, 1))
    assert (none.residents, none.hit_rate) == (2, 0)
    assert (half.residents, half.slots, half.hit_rate) == (1, 1, 0.5)
    assert whole.hit_rate == 0.5
    assert best_split([none, half, whole]) == half, "residents need no fills"


@pytest.mark.slow
def test_hot_experts_want_residents_and_changing_ones_slots(mixed):
    splits = slot_splits(mixed, 0.5)
    assert best_split(splits).slots > 0
    assert best_split(splits).step_seconds < splits[0].step_seconds / 2
    static = Trace(np.random.default_rng(2).integers(0, 4, (400, 2, 2)), np.full(4, 100), 16)
    assert best_split(slot_splits(static, 0.25)).slots == 0


@pytest.fixture
def saved(mixed, tmp_path):
    mixed.save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


@pytest.mark.slow
def test_the_command_prints_each_split_and_names_the_best(saved, mixed, capsys):
    command = ["replay", str(saved), "--residency", "0.5", "--batch", "2", "--link-gbps", "10", "--expert-mib", "2", "--slots"]
    assert main(command) == 0
    *lines, empty, last = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    assert main([*command, "--json"]) == 0
    splits = [Split(**each) for each in json.loads(capsys.readouterr().out)["slots"]]
    assert splits == slot_splits(mixed, 0.5, batch=2, link_gbps=10, expert_bytes=2 * MIB)
    for line, each in zip(lines[1:], splits, strict=True):
        share, _, fixed, slots, hit_rate, _, fills, *_ = line.split()
        assert (share, fixed, slots) == (f"{100 * each.slot_share:.0f}", str(each.residents), str(each.slots))
        assert (hit_rate, fills) == (f"{100 * each.hit_rate:.1f}", f"{each.fills_per_step:.3f}")
        assert f"{1e3 * each.step_seconds:.3f} ms" in line
    best = best_split(splits)
    assert not empty
    assert f"{100 * best.slot_share:.0f} % of the VRAM in slots ({best.residents} residents and {best.slots} slots" in last


def profile_at(path, layers: int = 2, experts: int = 16):
    return saved_profile(path, some(model=replace(MODEL, moe_layers=tuple(range(layers)), num_experts=experts)))


@pytest.mark.slow
def test_the_best_split_goes_into_a_profile(saved, mixed, tmp_path, capsys):
    path = profile_at(tmp_path / "p.npz")
    before = Profile.load(path)
    for residency in (0.5, 0.25, 0.5):
        assert main(["replay", str(saved), "--residency", str(residency), "--slots", "--into", str(path)]) == 0
    read = Profile.load(path)
    assert read.slot_shares == {residency: best_split(slot_splits(mixed, residency)).slot_share for residency in (0.25, 0.5)}
    assert (read.model, read.run) == (before.model, before.run)
    assert np.array_equal(read.seen.counts, before.seen.counts)
    assert "Lowest link time" in capsys.readouterr().out, "the sweep is printed as without"


@pytest.mark.parametrize(
    ("shape", "flags", "problem"),
    [
        ((3, 16), ["--slots"], "its model has 3 MoE layers of 16 experts, but the trace has 2 MoE layers of 16 experts"),
        ((2, 16), [], "needs --slots"),
        ((2, 16), ["--slots", "--residency", "0.01"], "0.01 has 0 of 16 experts in VRAM, which leaves nothing to split"),
        ((2, 16), ["--slots", "--residency", "1"], "1 has 16 of 16 experts in VRAM, which leaves nothing to split"),
        (None, ["--slots"], "No such file or directory"),
    ],
)
def test_what_cannot_take_a_split_is_one_line_before_anything_is_replayed(
    saved, tmp_path, capsys, monkeypatch, shape, flags, problem
):
    monkeypatch.setattr(simulator, "serve", lambda *_: pytest.fail("replayed"))
    path = tmp_path / "p.npz"
    if shape is not None:
        profile_at(path, *shape)
    before = path.read_bytes() if shape else None
    assert main(["replay", str(saved), "--residency", "0.5", *flags, "--into", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cannot replay {saved}: --into {path}: ")
    assert problem in line
    assert before is None or path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "top_k", "skew"), [(32, 4, 0.3), (32, 4, 0.6), (128, 8, 0.3)])
def test_slots_alone_miss_little_more_than_the_best_split_does(experts, top_k, skew):
    """So ``auto`` makes all of the VRAM slots (``residency/slot_split``)."""
    routed = Law(experts, top_k, skew, domains=3).trace(layers=4, requests=20, tokens=100, seed=3)
    alone = best = 0.0
    for residency in (0.25, 0.5, 0.78):
        missed = {split.slot_share: 1 - split.hit_rate for split in slot_splits(routed, residency)}
        alone, best = alone + missed[1.0], best + min(missed.values())
    assert alone <= 1.02 * best

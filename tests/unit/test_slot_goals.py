"""The benchmark of slots: its laws of locality, its command on tiny traces, and the committed results."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy import __main__ as benchmark
from benchmarks.policy import slots, sources
from benchmarks.policy.law import LAST_TOKEN, POINTS, Law
from benchmarks.policy.slots import Case
from benchmarks.policy.sources import Source
from sglang_uvm_offload.replay.baselines import Cache, lru
from sglang_uvm_offload.replay.policies import SHIPPED, SLOTS
from sglang_uvm_offload.replay.simulator import replay
from sglang_uvm_offload.routing.trace import Trace

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "slots"


def hit_rate_of_lru(trace: Trace, slots: int) -> float:
    activated = trace.activated(trace.steps(range(trace.num_requests), 1))
    cache = Cache(activated.shape[1:], np.full(activated.shape[1], slots), lru)
    served = [cache.step(used) for used in activated]
    return sum(int(one.hit.sum()) for one in served[200:]) / int(activated[200:].sum())


@pytest.mark.parametrize(("experts", "top_k"), sources.SIZES)
def test_a_law_goes_through_its_points(experts, top_k):
    places = np.cumsum(Law(experts, top_k).places())
    assert places[-1] == pytest.approx(1)
    assert places[top_k - 1] == pytest.approx(LAST_TOKEN)
    for share, hits in POINTS:
        assert places[round(share * experts) - 1] == pytest.approx(hits)


def test_lru_hits_as_often_as_the_law_says_less_what_a_token_does_not_use_twice():
    trace = Law(512, 10).trace(layers=1, requests=2, tokens=600, seed=0)
    for share, hits in POINTS:
        assert hits - 0.05 < hit_rate_of_lru(trace, round(512 * share)) <= hits


def test_a_token_uses_its_experts_once_and_a_seed_is_a_trace():
    law = Law(32, 6, skew=0.5, domains=2)
    ids = law.trace(layers=2, requests=3, tokens=50, seed=7).ids
    assert ids.shape == (150, 2, 6)
    assert all(len(set(row)) == 6 for token in ids.tolist() for row in token)
    assert np.array_equal(ids, law.trace(layers=2, requests=3, tokens=50, seed=7).ids)
    assert not np.array_equal(ids, law.trace(layers=2, requests=3, tokens=50, seed=8).ids)


def test_skew_is_toward_favourites_of_the_domain_and_domains_take_turns():
    trace = Law(64, 4, skew=1.0, domains=2).trace(layers=1, requests=4, tokens=500, seed=0)
    shares = [np.bincount(ids.ravel(), minlength=64) / ids.size for ids in np.split(trace.ids, 4)]
    popularity = Law(64, 4).favourites()
    assert popularity[0] / popularity[9] == pytest.approx(10)
    for share in shares:
        assert share.max() > 8 / 64
    same, other = np.abs(shares[0] - shares[2]).sum(), np.abs(shares[0] - shares[1]).sum()
    assert same < other / 3
    plain = Law(64, 4).trace(layers=1, requests=4, tokens=500, seed=0)
    assert (np.bincount(plain.ids.ravel(), minlength=64) / plain.ids.size).max() < 3 / 64


def small_trace(seed: int) -> Trace:
    """Twelve requests of 12 tokens in 4 layers of 16 experts."""
    rng = np.random.default_rng(seed)
    return Trace(rng.integers(0, 16, (144, 4, 2)) // rng.integers(1, 4, (144, 4, 2)), np.full(12, 12), 16)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[list[Case], str]:
    """What the one command writes for one trace and small laws."""
    folder = tmp_path_factory.mktemp("slots")
    small_trace(0).save(folder / "here.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SIZES", ((16, 2),))
        patch.setattr(sources, "TOKENS", 8)
        benchmark.main(["slots", str(folder / "here.npz"), "--out", str(folder / "out")])
        cases, text = read(folder / "out"), (folder / "out" / "slots.md").read_text()
        assert text == slots.markdown(cases)
    return cases, text


def read(folder: Path) -> list[Case]:
    return [Case(**each) for each in json.loads((folder / "slots.json").read_text())]


def test_every_trace_and_law_has_every_case(written):
    cases, text = written
    laws = list(product(("16/2",), [skew for skew, _ in sources.SKEWS], sources.SEEDS))
    expected = product([("here", None, 0), *laws], slots.BATCHES, slots.RESIDENCIES)
    assert [((c.trace, c.skew, c.seed), c.batch, c.residency) for c in cases] == list(expected)
    assert all(set(c.hit_rate) == set(c.crossings) == set(slots.POLICIES) for c in cases)
    a_row_for_all_seeds = (1 + len(laws) // len(sources.SEEDS)) * len(slots.BATCHES) * len(slots.RESIDENCIES)
    assert text.count("% |") == a_row_for_all_seeds


@pytest.mark.slow
def test_cases_are_what_the_command_replays(written):
    """Of a measured trace every third layer."""
    whole = small_trace(0)
    thinned = Trace(whole.ids[:, [0, 3]], whole.seq_len, 16)
    for case in [c for c in written[0] if c.skew is None]:
        for name in slots.POLICIES:
            alone = replay(thinned, name, case.residency, case.batch, expert_bytes=1)
            assert case.hit_rate[name] == pytest.approx(alone.hit_rate, abs=1e-5), name
            assert case.crossings[name] == pytest.approx(alone.read_bytes_per_step + alone.moved_bytes_per_step, abs=1e-5)


PLAIN = Case("16/2", 0.0, 0, 1, 0.5, {"lru": 0.5}, {SLOTS: 1.0, SHIPPED: 2.0, "lru": 1.0, "belady": 0.5})


def case(skew: float | None, slots: float, shipped: float = 2.0) -> Case:
    return replace(PLAIN, skew=skew, crossings=PLAIN.crossings | {SLOTS: slots, SHIPPED: shipped})


def met(cases: list[Case]) -> list[tuple[object, object]]:
    return [(each["met"], each["all"]) for each in slots.judge(cases)]


def test_means_are_judged_by_the_kind_of_routing_and_bounds_by_every_case():
    yes, no = ("1 of 1", True), ("0 of 1", False)
    good = [case(None, 0.88), case(0.0, 1.01), case(0.3, 0.95), case(0.6, 0.94)]
    assert met(good) == [yes, yes, yes, yes, yes, ("4 of 4", True), ("4 of 4", True)]
    mixed = [case(None, 0.8), case(None, 0.98), case(0.0, 1.02), case(0.3, 1.0), case(0.6, 0.9), case(0.6, 0.8, 0.7)]
    assert met(mixed) == [no, no, yes, no, yes, ("6 of 6", True), ("5 of 6", False)]
    assert met([case(0.0, 1.03, 1.04)])[-2:] == [("0 of 1", False), ("1 of 1", True)]


def test_the_text_names_each_missed_goal_with_its_worst_case():
    text = slots.markdown([case(0.0, 1.0), case(0.3, 0.96)])
    missed = text.split("Missed:\n")[1].split("\n#")[0].strip().splitlines()
    assert len(missed) == 2, "skew is judged together and alone, and what has no case is not missed"
    assert all(line.endswith("by 0.010") for line in missed)
    above = slots.markdown([case(None, 1.05), case(None, 1.03), case(None, 0.1)])
    assert "in every case: in 2 of 3 cases, by 0.020 on average and 0.030 at most" in above
    assert "No goal is missed." in slots.markdown([case(None, 0.8), case(0.0, 1.0), case(0.3, 0.9), case(0.6, 0.9)])


@pytest.mark.parametrize("study", ["residents", "slots"])
def test_files_that_are_no_traces_are_all_named_with_what_else_is_wrong(study, tmp_path, capsys):
    (tmp_path / "broken.npz").write_bytes(b"PK not a zip")
    with pytest.raises(SystemExit):
        benchmark.main(
            [study, str(tmp_path / "broken.npz"), str(tmp_path / "missing.npz"), "--out", str(tmp_path), "--jobs", "0"]
        )
    message = capsys.readouterr().err
    for named in ("broken.npz", "missing.npz", "--jobs must be at least 1, not 0"):
        assert named in message
    assert not (tmp_path / "slots.json").exists()


@pytest.mark.parametrize(
    ("words", "said"), [(["residents"], "needs a trace"), (["slots", "--tunings"], "options of residents")]
)
def test_a_study_takes_its_own_arguments(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([*words, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err


def test_the_committed_text_is_that_of_the_committed_figures():
    assert (RESULTS / "slots.md").read_text() == slots.markdown(read(RESULTS))


def test_the_committed_figures_are_of_every_case_of_this_benchmark():
    cases = read(RESULTS)
    found = {(c.trace, c.skew, c.seed, c.batch, c.residency) for c in cases}
    every = list(product(slots.BATCHES, slots.RESIDENCIES))
    traces = {(c.trace, c.skew, c.seed) for c in cases if c.skew is None}
    assert len(traces) >= 4
    traces |= {(source.name, source.skew, source.seed) for source in sources.sources([])}
    assert found == {(*trace, *each) for trace, each in product(traces, every)}


@pytest.mark.slow
def test_the_committed_figures_are_those_of_the_present_rules():
    """A rule that changes needs a new run."""
    source: Source = next(s for s in sources.sources([]) if (s.name, s.skew) == ("128/8", 0.3))
    committed = [c for c in read(RESULTS) if (c.trace, c.skew, c.seed, c.batch) == ("128/8", 0.3, source.seed, 8)]
    assert [asdict(c) for c in slots.run(source, 8)] == [asdict(c) for c in committed]

"""The benchmark of the split between residents and slots: its command on a tiny trace, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy import __main__ as benchmark
from benchmarks.policy import sources, splits
from sglang_uvm_offload.replay.simulator import slot_splits as splits_of
from sglang_uvm_offload.routing.trace import Trace
from sglang_uvm_offload.sizing.slots import COARSE_SHARE, FINE_SHARE

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "slots"


def cases_in(folder: Path) -> list[splits.Case]:
    return [splits.Case(**case) for case in json.loads((folder / "splits.json").read_text())]


@pytest.mark.slow
def test_cases_are_what_replay_finds_of_each_split(tmp_path):
    rng = np.random.default_rng(0)
    trace = Trace(rng.integers(0, 8, (96, 1, 2)), np.full(8, 12), 8)
    trace.save(tmp_path / "here.npz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SIZES", ((16, 2),))
        patch.setattr(sources, "TOKENS", 8)
        benchmark.main(["splits", str(tmp_path / "here.npz"), "--out", str(tmp_path)])
    cases = cases_in(tmp_path)
    per_source = len(splits.BATCHES) * len(splits.RESIDENCIES)
    assert len(cases) == per_source * (1 + len(sources.SKEWS)), "of the seeds one"
    for case in cases[:per_source]:
        seconds = [split.step_seconds for split in splits_of(trace, case.residency, case.batch)]
        assert case.splits == pytest.approx([one / min(seconds) for one in seconds], abs=1e-3)
        assert min(case.splits) == 1
    assert (tmp_path / "splits.md").read_text() == splits.markdown(cases)


def test_the_committed_text_is_that_of_the_committed_figures():
    assert (RESULTS / "splits.md").read_text() == splits.markdown(cases_in(RESULTS))


@pytest.mark.parametrize(("fine", "share"), [(True, FINE_SHARE), (False, COARSE_SHARE)])
def test_the_share_that_auto_takes_is_within_five_percent_of_the_best_split_on_average(fine, share):
    """Measured routing is of models with fewer than 128 experts, the laws are of more."""
    chosen = splits.SHARES.index(share)
    relative = [case.splits[chosen] for case in cases_in(RESULTS) if (case.skew is not None) == fine]
    assert np.mean(relative) <= 1.05

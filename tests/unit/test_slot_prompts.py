"""The benchmark of slots that a prefill fills: what it counts, its command on a tiny trace, and the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.policy import __main__ as benchmark
from benchmarks.policy import prompts, sources
from sglang_uvm_offload.routing.trace import Trace

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "slots"
HALF, _, SHORT = prompts.CUTS


def cases_in(folder: Path) -> list[prompts.Case]:
    return [prompts.Case(**case) for case in json.loads((folder / "prompts.json").read_text())]


def trace_of(*requests: list[int], experts: int = 8) -> Trace:
    """Of one layer and one expert a token."""
    return Trace(np.concatenate(requests)[:, None, None], np.array([len(ids) for ids in requests]), experts)


def test_what_a_prompt_that_streams_leaves_in_slots_does_not_cross_the_link_again():
    """Of the second request two tokens are prompt, two are decoded."""
    trace = trace_of([6, 7, 6, 7], [0, 1, 0, 1])
    assert prompts.crossings(trace, HALF, 1, 0.5, filling=False) == 1
    assert prompts.crossings(trace, HALF, 1, 0.5, filling=True) == 0


def test_what_a_prompt_reads_in_place_crosses_with_it():
    trace = trace_of([6, 7, 6, 7], [0, 1, 0, 1])
    assert prompts.crossings(trace, SHORT, 1, 0.5, filling=False) == 2
    assert prompts.crossings(trace, SHORT, 1, 0.5, filling=True) == 1


def test_requests_that_run_at_once_are_prefilled_together_and_decoded_together():
    trace = trace_of([6, 6], [7, 7], [0, 1], [2, 3])
    assert prompts.crossings(trace, HALF, 2, 1.0, filling=True) == 2, "one step of two experts"
    assert prompts.crossings(trace, HALF, 1, 1.0, filling=True) == 1


@pytest.mark.slow
def test_the_command_judges_each_trace_each_law_and_the_traces_of_one_model_together(tmp_path):
    rng, paths = np.random.default_rng(0), []
    for name, layers in (("a", 1), ("b", 1), ("c", 4)):
        paths.append(str(tmp_path / f"{name}.npz"))
        Trace(rng.integers(0, 8, (96, layers, 2)), np.full(8, 12), 8).save(paths[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "SIZES", ((16, 2),))
        patch.setattr(sources, "TOKENS", 8)
        benchmark.main(["prompts", *paths, "--out", str(tmp_path)])
    cases = cases_in(tmp_path)
    names = list(dict.fromkeys(case.trace for case in cases))
    assert names == ["mix of a, b", "a", "b", "c", "16/2"]
    each = len(prompts.CUTS) * len(prompts.BATCHES) * len(prompts.RESIDENCIES)
    assert len(cases) == each * (4 + len(sources.SKEWS)), "of the seeds one"
    assert (tmp_path / "prompts.md").read_text() == prompts.markdown(cases)


def test_the_committed_text_is_that_of_the_committed_figures():
    assert (RESULTS / "prompts.md").read_text() == prompts.markdown(cases_in(RESULTS))


@pytest.mark.slow
def test_the_committed_figures_are_those_of_the_policy():
    """Of one case on generated routing; a changed rule demands a new run."""
    source = next(source for source in sources.sources([]) if source.skew == 0.6)
    case = next(case for case in cases_in(RESULTS) if (case.trace, case.skew, case.cut) == (source.name, 0.6, HALF.name))
    found = [prompts.crossings(source.trace(), HALF, case.batch, case.residency, on) for on in (False, True)]
    assert [case.without, case.filling] == pytest.approx(found, abs=1e-5)

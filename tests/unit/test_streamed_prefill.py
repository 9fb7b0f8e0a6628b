"""benchmarks/streamed_prefill.py: the modelled GPU keeps the order of copies, and the committed page is of its figures."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from benchmarks import streamed_prefill as bench
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.staging import Part
from sglang_uvm_offload.routing.trace import Trace

CONFIGS = Path(__file__).parents[1] / "fixtures" / "models"
RESULTS = bench.HERE / "results" / "prefill"
RECORD = json.loads((RESULTS / "prefill.json").read_text())
FOUND = bench.Figures.of(RECORD)


@pytest.fixture(scope="module")
def models() -> dict[str, bench.Model]:
    return {served.name: bench.Model(served, served.shape(CONFIGS)) for served in bench.MODELS}


class Staged:
    """Two layers of two experts, one of them offloaded: a copy takes 1 s."""

    def __init__(self, buffers: int = 2, vram_rate: float = float("inf")):
        self.gpu = bench.Gpu()
        self.layers = bench.expert_layers([[BLOCK_BYTES]] * 2, 2, 1)
        self.staging = bench.ModelledStaging(self.gpu, self.layers, buffers, BLOCK_BYTES, vram_rate)

    def copy(self, buffer: int, row: int = 0) -> None:
        self.staging.copy(buffer, [Part(self.layers[row].tensors[0].managed, 2 * BLOCK_BYTES, 0)])


def test_the_page_is_that_of_the_committed_figures() -> None:
    assert (RESULTS / "prefill.md").read_text() == bench.page(FOUND)
    assert json.loads(json.dumps(asdict(FOUND))) == RECORD


def test_the_page_of_the_host_is_that_of_its_figures() -> None:
    record = json.loads((RESULTS / "host.json").read_text())
    assert (RESULTS / "host.md").read_text() == bench.host_page(bench.Host(**record["host"]), record["machine"])


def test_the_figures_are_of_every_model_share_and_size() -> None:
    sizes = sorted({*bench.SWEEP, *bench.CHUNKS})
    cases = [(model.name, share, tokens) for model in bench.MODELS for share in bench.SHARES for tokens in sizes]
    assert [(each.model, each.share, each.tokens) for each in FOUND.rows] == cases
    assert {each.trace for each in FOUND.thresholds} == set(bench.TRACES)
    assert len(FOUND.thresholds) == len(bench.TRACES) * len(bench.SHARES) * 2
    assert all(len(each.used) == len(each.crossings) == len(bench.STEPS) for each in FOUND.thresholds)


@pytest.mark.slow
@pytest.mark.parametrize("name", [served.name for served in bench.MODELS])
def test_the_figures_are_those_that_the_program_makes_now(name: str, models: dict[str, bench.Model]) -> None:
    """Those that no trace is needed for, for two chunks of each share."""
    for share in bench.SHARES:
        offloaded = bench.Offloaded(models[name], share)
        assert bench.Auto(name, share, models[name].break_even(offloaded.num_resident)) in FOUND.auto
        for tokens in (512, 8192):
            (committed,) = [each for each in FOUND.rows if (each.model, each.share, each.tokens) == (name, share, tokens)]
            made = asdict(bench.row(offloaded, share, tokens, None))
            del made["traced"]
            assert {key: asdict(committed)[key] for key in made} == made


def test_what_was_measured_stands_beside_the_model(models: dict[str, bench.Model]) -> None:
    assert tuple(bench.checks(models[bench.QWEN.name])) == FOUND.checks


def test_streaming_is_never_faster_than_computing_or_copying_and_one_buffer_never_than_two() -> None:
    for each in FOUND.rows:
        assert max(each.resident, each.copying, each.in_vram) <= each.two * (1 + 1e-6)
        assert each.two <= each.one
        assert each.resident <= each.in_place


def test_the_planner_predicts_what_the_modelled_gpu_takes_for_the_shipped_order_of_copies() -> None:
    assert [each.two / each.planned for each in FOUND.rows] == pytest.approx([1.0] * len(FOUND.rows), abs=0.04)


def test_a_copy_waits_for_the_readers_before_it_and_a_reader_for_its_copy() -> None:
    staged = Staged()
    staged.gpu.compute(5.0, 0.0)
    staged.staging.begin_step()
    staged.copy(0)
    staged.staging.acquire(0)
    assert staged.gpu.computed == 6.0
    staged.copy(1, row=1)  # while the layer computes
    staged.gpu.compute(3.0, 0.0)
    staged.staging.release(0)
    assert (staged.gpu.computed, staged.gpu.copied) == (9.0, 9.0)
    staged.copy(0)
    staged.staging.acquire(1)
    assert (staged.gpu.computed, staged.gpu.copied) == (9.0, 10.0)


@pytest.mark.parametrize(("vram_rate", "seconds"), [(2.0, 1.0), (0.5, 2.0)])
def test_a_copy_begins_when_it_is_launched_and_ends_with_the_slower_of_link_and_vram(vram_rate: float, seconds: float) -> None:
    staged = Staged(vram_rate=vram_rate * BLOCK_BYTES)
    staged.gpu.compute(0.0, 4.0)
    staged.copy(0)
    assert staged.gpu.copied == 4 + seconds


def test_filling_a_buffer_that_is_read_is_an_error() -> None:
    staged = Staged(buffers=1)
    staged.copy(0)
    staged.staging.acquire(0)
    staged.gpu.compute(1.0, 0.0)
    with pytest.raises(RuntimeError, match="read until"):
        staged.copy(0, row=1)
    staged.staging.release(0)
    staged.copy(0, row=1)


def test_kernels_end_no_earlier_than_they_are_launched() -> None:
    gpu = bench.Gpu()
    gpu.compute(1.0, 2.0)
    assert (gpu.host, gpu.computed) == (2.0, 2.0)
    gpu.compute(3.0, 1.0)
    assert (gpu.host, gpu.computed) == (3.0, 5.0)


def test_the_layers_have_the_sizes_of_the_model(models: dict[str, bench.Model]) -> None:
    model = models["GLM-5 (FP8), 8 H20"]
    offloaded = bench.Offloaded(model, 0.5)
    assert len(offloaded.layers) == model.moe_layers
    assert sum(layer.offloaded_bytes for layer in offloaded.layers) == model.case.offloaded_bytes(0, offloaded.num_resident)


def test_windows_of_a_trace_count_rows_and_the_first_half_chooses_residents() -> None:
    first = np.array([[[0, 1]], [[0, 1]], [[0, 2]], [[1, 0]]])
    second = np.array([[[2, 3]], [[2, 3]], [[2, 0]], [[2, 3]]])
    trace = bench.Measured("it", Trace(np.concatenate([first, second]), np.array([4, 4]), 4))
    assert trace.offloaded(0.5).tolist() == [[False, False, True, True]]
    assert trace.rows(trace.ids).tolist() == [[1, 0, 4, 3]]
    routing = trace.routing(4, 0.5, rows_per_read=2)
    assert routing == bench.Routing(hit_rate=1 / 8, crossings=2.0)
    assert trace.routing(5, 0.5, rows_per_read=2) is None


def test_a_threshold_counts_experts_and_reads_of_all_offloaded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STEPS", (1, 4))
    ids = np.array([[[0, 1]]] * 4 + [[[2, 3]]] * 4)
    trace = bench.Measured("it", Trace(ids, np.array([4, 4]), 6))
    found = bench.threshold(trace, 0.5, spread=False)  # 3 to 5 are offloaded, but for one that ties
    assert found.used == found.crossings == (pytest.approx(1 / 3, abs=1e-4),) * 2
    assert found.first((0.5, 0.95), 0.9) == 4
    assert found.first((0.5, 0.6), 0.9) is None


def test_the_worst_choice_is_of_the_slower_way_where_it_is_chosen() -> None:
    row = dataclasses.replace(FOUND.rows[0], tokens=256, two=2.0, in_place=3.0, traced=1.0)
    found = dataclasses.replace(FOUND, rows=(row,), auto=(bench.Auto(row.model, row.share, 128),))
    assert [bench.worst_choice(found, times, False) for times in (1, 2, 4)] == [1.0, 1.0, 1.5]
    assert [bench.worst_choice(found, times, True) for times in (1, 2, 4)] == [2.0, 2.0, 1.0]
    assert bench.wins_from((row, dataclasses.replace(row, tokens=512, traced=4.0)), traced=True) == 512


def test_the_hosts_time_is_of_layers_that_stream() -> None:
    host = bench.host_time(num_layers=3, tensors=2, steps=2)
    assert 0 < host.best <= host.median

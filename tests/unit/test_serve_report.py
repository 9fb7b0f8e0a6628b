"""What the server benchmark does with figures and failures, without any server: settings of the contenders, ratios, logs, the
cost model."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    contenders,
    docs_tables,
    link_rates,
    measured_table,
    model,
    serve_client,
    serve_log,
    serve_report,
    serve_run,
)
from benchmarks.contenders import CONTENDERS, Budget, CannotServe
from benchmarks.link_rates import Rates
from scripts import make_checkpoint
from sglang_uvm_offload.plan.engine_shape import shape_of_config
from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.model_shape import ModelShape

pytestmark = pytest.mark.sglang

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30


def shape_of(**sizes: int) -> ModelShape:
    wanted = make_checkpoint.Shape(**sizes)
    return shape_of_config("qwen3", make_checkpoint.FAMILIES["qwen3_moe"].config(wanted) | {"torch_dtype": "bfloat16"})


LARGE = {"layers": 16, "hidden": 2048, "experts": 128, "top_k": 8, "expert_size": 768}


def budget(residency: float) -> Budget:
    return Budget(shape_of(**LARGE), residency, 64)


# ---- contenders ----


@pytest.mark.parametrize("residency", [0.25, 0.5, 0.78])
def test_every_contender_that_serves_keeps_at_most_the_budget_in_vram(residency: float) -> None:
    asked = budget(residency)
    experts, layer = asked.model.expert_bytes, asked.layer_bytes
    granted = residency * experts
    assert asked.residents * experts / 128 <= granted
    assert experts - asked.offloaded_bytes(asked.residents) <= granted
    ours = CONTENDERS["frequency"].flags(asked)
    paged = CONTENDERS["paged_experts"].flags(asked)
    assert ours["expert_offload_num_resident"] == paged["paged_experts_num_resident"] == asked.residents
    out = CONTENDERS["cpu_offload_gb"].flags(asked)["cpu_offload_gb"] * GIB
    assert experts - out + layer <= granted, "a layer comes back to VRAM while it computes"
    groups = CONTENDERS["offloader_v2"].flags(asked)
    size, away, ahead = (groups[f"offload_{name}"] for name in ("group_size", "num_in_group", "prefetch_step"))
    kept = sum(index % size < size - away for index in range(16))
    assert (kept + ahead + 1) * layer <= granted, "the layer that computes and those on their way are in VRAM too"


def test_layers_are_offloaded_as_few_and_as_far_apart_as_the_budget_allows() -> None:
    flags = CONTENDERS["offloader_v2"].flags(budget(0.625))
    assert (flags["offload_group_size"], flags["offload_num_in_group"]) == (2, 1)  # 6 layers out, and room for 2


@pytest.mark.parametrize("residency", [0.4, 0.5, 0.6, 0.7])
def test_dense_layers_count_for_no_group(residency: float) -> None:
    wanted = make_checkpoint.Shape(layers=12)
    config = make_checkpoint.FAMILIES["deepseek_v3"].config(wanted) | {"torch_dtype": "bfloat16", "first_k_dense_replace": 3}
    flags = CONTENDERS["offloader_v2"].flags(Budget(shape_of_config("deepseek", config), residency, 64))
    size, away = flags["offload_group_size"], flags["offload_num_in_group"]
    assert sum(index % size >= size - away for index in range(3, 12)) >= (1 - residency) * 9 + 2


def test_a_budget_that_a_contender_cannot_hold_is_refused_by_it() -> None:
    with pytest.raises(CannotServe, match="at least the 8 that a token chooses"):
        CONTENDERS["paged_experts"].flags(budget(0.05))
    with pytest.raises(CannotServe, match=r"leaves 1\.6 of 16 MoE layers in VRAM, and 2 offloaded"):
        CONTENDERS["offloader_v2"].flags(budget(0.1))


def test_zero_copy_has_no_resident_and_residencies_do_not_repeat_bounds() -> None:
    assert CONTENDERS["zero_copy"].flags(budget(0.0))["expert_offload_num_resident"] == 0
    cells = [(contender.name, residency) for contender, residency in contenders.cells(["first_n", "zero_copy"], [0.78, 0.5])]
    assert cells == [("resident", 1.0), ("first_n", 0.78), ("first_n", 0.5), ("zero_copy", 0.0)]


# ---- what servers say ----


def test_answers_are_compared_to_the_first_token_that_differs() -> None:
    assert serve_run.compare([[1, 2], [3, 4]], [[1, 2], [3, 4]])["same"] is True
    other = serve_run.compare([[1, 2], [3, 5]], [[1, 2], [3, 4]])
    assert other["same"] is False
    assert other["first_difference"] == {"request": 1, "position": 1, "token": 5, "reference": 4}
    assert serve_run.compare([[1]], None)["same"] is None


LOG = """[2026-01-01 10:00:00] server_args=...
Traceback (most recent call last):
  File "scheduler.py", line 3, in run
    raise RuntimeError(...)
RuntimeError: Paged experts: fused shared experts are not supported
[2026-01-01 10:00:01] Rank 0 scheduler died during initialization (exit code: -3)
RuntimeError: Rank 0 scheduler died during initialization (exit code: -3)
Killed
"""


def test_the_reason_in_a_log_is_its_last_exception_and_no_echo_of_it() -> None:
    assert serve_log.last_meaningful_line(LOG) == "RuntimeError: Paged experts: fused shared experts are not supported"
    refused = "usage: ...\nlaunch_server.py: error: --expert-offload-num-resident 200: the model has 128\n"
    assert serve_log.last_meaningful_line(refused) == "--expert-offload-num-resident 200: the model has 128"
    assert serve_log.last_meaningful_line("loading\nSegmentation fault\n") == "Segmentation fault"
    assert serve_log.last_meaningful_line("") == "its log is empty"


def test_the_seconds_of_loading_are_the_first_ranks_by_sglangs_account():
    told = "[2026-11-26 03:04:05 TP{}] Load weight end. elapsed={} s, type=Qwen3MoeForCausalLM, avail mem=9.00 GB.\n"
    assert serve_log.load_seconds("begin\n" + told.format(1, "12.34") + told.format(0, "12.50")) == 12.34
    assert serve_log.load_seconds("Load weight begin. avail mem=9.00 GB\n") is None


def test_large_logs_are_kept_compressed_and_read_alike(tmp_path: Path) -> None:
    text = f"{sys.prefix}/lib/x.py: {tmp_path}/server/y\n"
    for times, name in ((1, "a.log"), (2000, "a.log.gz")):
        kept = serve_log.keep(text * times, tmp_path / "logs" / "a.log", tmp_path / "model", tmp_path / "server")
        assert kept == name
        assert serve_log.read(tmp_path / "logs" / kept) == "PYTHON/lib/x.py: SERVER/y\n" * times


# ---- timing ----


class Clock:
    """A server that takes long for a prompt whose experts no cache holds yet, and a fixed time for each token of a batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_token: float):
        self.now, self.read, self.steps, self.per_token = 0.0, 0, 0, per_token
        self.asked: list[list[list[int]]] = []
        monkeypatch.setattr(serve_client.time, "perf_counter", lambda: self.now)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        for _ in self.streamed(prompts, new_tokens):
            pass
        return [[1] * new_tokens for _ in prompts]

    def streamed(self, prompts: list[list[int]], new_tokens: int, every: int = 1) -> Iterator[tuple[int, int]]:
        cold = prompts not in self.asked
        self.asked.append(prompts)
        self.now += 5.0 if cold else 1.0
        self.read += 1000 if cold else 200
        for token in range(1, new_tokens + 1):
            self.now += self.per_token
            self.read, self.steps = self.read + 10, self.steps + 1
            if token % every in (0, 1) or token == new_tokens:
                for request in range(len(prompts)):
                    self.now += 0.01  # the pieces of one step
                    yield token if request == len(prompts) - 1 else token - 1, token

    def counters(self) -> dict[str, float]:
        self.now += 100.0
        return {"steps": self.steps, "read_bytes": self.read}


SIZES = serve_client.Sizes((1, 4), (16,), 8, 2, 10, 3, 2, 4, 16)


@pytest.mark.parametrize("batch", [1, 4])
def test_decode_time_holds_neither_prefill_nor_the_asking_for_counters(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    clock = Clock(monkeypatch, 0.25)
    timed = serve_client.decode(clock, lambda i, n: [i] * n, batch, SIZES, clock.counters)  # type: ignore[arg-type]
    assert timed.samples == pytest.approx([0.25 + 0.01 * batch] * 3)
    assert timed.extra == {"read_bytes": 10}
    timed = serve_client.prefill(clock, lambda i, n: [i] * n, 16, SIZES, clock.counters)  # type: ignore[arg-type]
    assert timed.samples == pytest.approx([5.26] * 3)
    assert timed.extra["read_bytes"] == 1010


def test_no_request_is_decoded_twice_nor_was_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.25)
    serve_client.warm(clock, lambda i, n: [i] * n, SIZES)  # type: ignore[arg-type]
    warm = {prompt[0] for prompts in clock.asked for prompt in prompts}
    clock.asked.clear()
    for batch in SIZES.batches:
        serve_client.decode(clock, lambda i, n: [i] * n, batch, SIZES, clock.counters)  # type: ignore[arg-type]
    decoded = [prompt[0] for prompts in clock.asked for prompt in prompts]
    assert len({*decoded}) == len(decoded) == (1 + 4) * (SIZES.samples + 1)
    assert not warm & {*decoded}


def test_steps_after_the_first_request_has_ended_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.0)

    def streamed(prompts: list[list[int]], new_tokens: int, every: int) -> Iterator[tuple[int, int]]:
        for least in range(1, new_tokens + 1):  # one prompt was computed three steps later than the others
            clock.now += 1.0 if least <= new_tokens - 3 else 50.0
            yield least, min(new_tokens, least + 3)

    clock.streamed = streamed  # type: ignore[method-assign]
    timed = serve_client.decode(clock, lambda i, n: [i] * n, 4, SIZES)  # type: ignore[arg-type]
    assert timed.samples == [1.0] * 3


PIECES = (ROOT / "tests" / "fixtures" / "streamed.txt").read_bytes().splitlines()
"""What SGLang 0.5.23 sent for two prompts of four tokens, six tokens each, and for one that is too long."""


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lines that the next answer streams."""
    lines: list[bytes] = []

    def request(*_: Any, **__: Any) -> Any:
        answer = SimpleNamespace(status_code=200, iter_lines=lambda: iter(lines))
        return contextlib.nullcontext(answer)

    monkeypatch.setattr(serve_client.requests, "request", request)
    return lines


def test_pieces_of_streamed_answers_are_counted_by_request(transport: list[bytes]) -> None:
    end = PIECES.index(b"data: [DONE]") + 1
    answered, refused = PIECES[:end], PIECES[end:]
    client = serve_client.Client("http://server", 60)
    transport[:] = answered
    steps = [*client.streamed([[1] * 4] * 2, 6)]
    assert steps[:3] == [(0, 1), (1, 1), (1, 2)]
    assert steps[-1] == (6, 6)
    with pytest.raises(serve_client.PointFailed, match="2 requests for 7 tokens: streamed answers of 6 to 6"):
        list(client.streamed([[1] * 4] * 2, 7))
    transport[:] = refused
    with pytest.raises(serve_client.PointFailed, match=r"^The input \(5000 tokens\) is longer"):
        list(client.streamed([[1] * 5000], 6))


def test_long_prompts_are_answered_after_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    clock = Clock(monkeypatch, 0.0)
    answer = clock.generate

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        asked.append(len(prompts[0]))
        return answer(prompts, new_tokens)

    clock.generate = generate  # type: ignore[method-assign]
    sizes = replace(SIZES, long_answers=(40, 500))
    answers = serve_client.answers(clock, lambda i, n: [i] * n, sizes)  # type: ignore[arg-type]
    assert asked == [2, 4, 40, 500]
    assert len(answers) == 4
    assert sizes.most_tokens >= 500 + sizes.answer_tokens, "the KV cache holds them"


def test_what_is_counted_of_a_server() -> None:
    """Bytes that fill slots are read too."""
    layers = [{"routed_resident": 20.5}, {"routed_resident": 10.0}]
    state = {"zero_copy_bytes": 5, "streamed_bytes": 70, "routed": 64, "layers": layers, "moves": 3, "moved_bytes": 9}
    state["history"] = {"steps": [0, 7]}
    found = {"steps": 7, "read_bytes": 75, "routed": 64, "routed_resident": 30.5, "moves": 3, "moved_bytes": 9}
    assert serve_run.counted(SimpleNamespace(offload=lambda: state)) == found  # type: ignore[arg-type]
    state["slots"] = {"filled_bytes": 200, "hits": 1, "fills": 2, "bypasses": 3, "brought": 4}
    found |= {"read_bytes": 275, "slot_hits": 1, "slot_fills": 2, "slot_bypasses": 3}
    assert serve_run.counted(SimpleNamespace(offload=lambda: state)) == found  # type: ignore[arg-type]


def test_the_warm_up_goes_on_for_the_step_after_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 0.0)
    sizes = replace(SIZES, warmup_tokens=1000)
    served = 0

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        nonlocal served
        served += sum(len(prompt) + new_tokens - 1 for prompt in prompts)
        return [[1] * new_tokens for _ in prompts]

    clock.generate = generate  # type: ignore[method-assign]
    assert serve_client.warm(clock, lambda i, n: [1] * n, sizes) == served  # type: ignore[arg-type]
    assert served - (sizes.prompt_tokens + sizes.long - 1) >= 1000, "the last request comes after all that were asked for"


def test_a_time_that_cannot_be_resolved_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, -0.01)
    with pytest.raises(serve_client.PointFailed, match="not resolved: 10 tokens came no later than 2"):
        serve_client.decode(clock, lambda i, n: [1] * n, 1, SIZES)  # type: ignore[arg-type]
    clock.streamed = lambda *_: iter([(1, 1), (1, 10), (10, 10)])  # type: ignore[method-assign]
    with pytest.raises(serve_client.PointFailed, match="not resolved: the requests of a batch did not decode together"):
        serve_client.decode(clock, lambda i, n: [1] * n, 4, SIZES)  # type: ignore[arg-type]


def test_requests_are_the_same_for_every_server_and_differ_from_each_other() -> None:
    prompts = serve_client.random_prompts(320, 7)
    assert prompts(3, 20) == serve_client.random_prompts(320, 7)(3, 20)
    assert prompts(3, 20) != prompts(4, 20)
    assert set(prompts(0, 5000)) == set(range(1, 257)), "bytes, and not the end of a text"


# ---- the report ----


def cell(contender: str, residency: float, repeat: int, decode: dict[int, list[float]], **more: Any) -> dict[str, Any]:
    points = [{"kind": "decode", "size": size, "error": None, "samples": found} for size, found in decode.items()]
    row = {"contender": contender, "residency": residency, "repeat": repeat, "error": None, "points": points, "note": ""}
    outputs = {"same": True, "requests": 2, "first_difference": None}
    return row | {"startup_seconds": 3.0, "outputs": outputs} | more


def record_of(rows: list[dict[str, Any]], measured: bool = True) -> dict[str, Any]:
    environment: dict[str, Any] = {"sglang": "0.5.23", "torch": "2", "driver": "1"}
    environment |= {"host_total_bytes": 100 * GIB, "vram_total_bytes": 140 * GIB}
    shape = {"name": "m", "architecture": "A", "experts": 128, "top_k": 8, "moe_layers": 16}
    return {
        "format": serve_report.FORMAT,
        "started": "2026-01-02T03:04:05+00:00",
        "device": "NVIDIA H200" if measured else "CPU",
        "measured": measured,
        "environment": environment,
        "model": shape | {"expert_bytes": 9, "total_bytes": 10},
        "contenders": {name: {"what": contender.what} for name, contender in CONTENDERS.items()},
        "methods": serve_client.METHODS,
        "sizes": {"prompt_tokens": 64, "long": 24},
        "residencies": [0.5],
        "repeats": 2,
        "server_args": [],
        "rows": rows,
    }


TWICE = [
    cell("resident", 1.0, 1, {1: [1.0, 1.0]}),
    cell("first_n", 0.5, 1, {1: [2.0, 2.0]}),
    cell("resident", 1.0, 2, {1: [2.0, 2.0]}),
    cell("first_n", 0.5, 2, {1: [6.0, 6.0]}),
]


def test_a_ratio_is_of_medians_and_its_spread_is_of_repeats() -> None:
    assert serve_report.ratio(record_of(TWICE), ("first_n", 0.5), "decode", 1) == (4.0 / 1.5, 2.0, 3.0)
    assert serve_report.ratio(record_of(TWICE[1:2]), ("first_n", 0.5), "decode", 1) is None


def test_every_cell_is_a_line_and_every_failure_is_named() -> None:
    dead = cell("paged_experts", 0.5, 1, {}, error="RuntimeError: no") | {"outputs": {"same": None}}
    wrong = cell("frequency", 0.5, 1, {1: [1.5]}, outputs={"same": False, "requests": 2, "first_difference": {"request": 0}})
    wrong["points"].append({"kind": "prefill", "size": 512, "error": "HTTP 500: no"})
    wrong["points"][0]["read_bytes"] = 3 << 20
    record = record_of([*TWICE, wrong, dead])
    text = serve_report.markdown(record)
    assert "| paged_experts 50% | SGLang's --enable-paged-experts | 0 of 1 | not compared |" in text
    assert "| frequency 50% | this plugin, the most used experts, chosen once after the warm-up | 1 of 1 | **no** |" in text
    assert "- paged_experts 50%: RuntimeError: no" in text
    assert "- frequency 50%, prefill 512: HTTP 500: no" in text
    assert "| first_n 50% | 2.67 (2.00 to 3.00) |" in text
    assert "| frequency 50% | 3.0 MiB |" in text
    assert serve_report.NO_SPEED not in text
    assert serve_report.NO_SPEED in serve_report.markdown(record_of(TWICE, measured=False))


def test_a_section_of_a_gpu_session_is_a_run_whose_parts_are_its_repeats(tmp_path: Path) -> None:
    head = {name: value for name, value in record_of([]).items() if name != "rows"}
    part = [{"row": "run", "run": head}, *({"row": "cell", "cell": row} for row in TWICE[:2])]
    section = {"measured": True, "parts": {"checkpoint": {"rows": []}, "frequency": {"rows": part}, "again": {"rows": part}}}
    (tmp_path / "server.json").write_text(json.dumps(section))
    record = serve_report.load(tmp_path / "server.json")
    assert [row["repeat"] for row in record["rows"]] == [1, 1, 2, 2]
    assert record["repeats"] == 2
    assert serve_report.ratio(record, ("first_n", 0.5), "decode", 1) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("text", "told"), [("{", "no JSON"), ("[]", "no run of format 1"), ('{"parts": {}}', "none of its parts served anything")]
)
def test_a_file_that_is_no_run_is_refused_with_its_name(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(serve_report.NotARun, match=told) as refused:
        serve_report.load(tmp_path)
    assert str(tmp_path / "run.json") in str(refused.value)


# ---- the README's table ----


def test_the_table_has_the_spread_of_each_figure_and_how_servers_were_started() -> None:
    rows = [cell("resident", 1.0, 1, {1: [0.001, 0.003, 0.002]}), cell("frequency", 0.5, 1, {1: [0.004, 0.010, 0.006]})]
    record = record_of(rows) | {"server_args": ["--disable-prefill-cuda-graph", "--chunked-prefill-size", "8192"], "repeats": 1}
    record["sizes"]["samples"] = 3
    assert "| decode step, batch 1 | 1.0 to 3.0 | 4.0 to 10.0 (3.0x) |" in measured_table.table(record)
    started = measured_table.table(record).splitlines()[-1]
    assert "1 start, 3 samples" in started
    assert "`--disable-prefill-cuda-graph --chunked-prefill-size 8192`" in started


@pytest.mark.parametrize("log", [docs_tables.MEASURED, docs_tables.QUARTER], ids=lambda log: log.stem)
def test_small_batches_that_a_log_could_not_time_are_not_shown(log: Path) -> None:
    record = serve_report.load(log)
    assert serve_report.sizes(record, "decode") == [1, 4, 16, 64]
    assert measured_table.sizes(record, "decode") == [16, 64]
    assert measured_table.sizes(record, "prefill") == serve_report.sizes(record, "prefill")
    assert measured_table.sizes(record | {"methods": serve_client.METHODS}, "decode") == [1, 4, 16, 64]


# ---- the cost model ----


EXPERT = 3 * 2048 * 768 * 2
"""Bytes of one expert of ``LARGE``."""


def measured_run(
    seconds: float, counted: float | None, size: int = 4, kind: str = "decode", resident: float = 0.010, **status: Any
) -> dict[str, Any]:
    """A server with half of the experts resident, whose status says ``status`` too, beside one with all."""
    rows = [cell("resident", 1.0, 1, {size: [resident]}), cell("first_n", 0.5, 1, {size: [seconds]})]
    for row in rows:
        row["points"][0]["kind"] = kind
    rows[1]["offload"] = {"hit_rate": 0.5} | status
    if counted is not None:
        rows[1]["points"][0]["read_bytes"] = counted
    return record_of(rows)


def compared(record: dict[str, Any]) -> model.Compared:
    (only,) = model.compare(record, shape_of(**LARGE), RATES, model.machine_of(record))
    return only


RATES = Rates(40.0, 50.0, 55.0)
COPY, IN_VRAM = 64 * EXPERT / 50e9, 64 * EXPERT / (Assumptions.vram_copy_gbps * 1e9)
"""Seconds of a layer half of whose experts are offloaded."""
LOST = Assumptions.copy_slows * COPY + Assumptions.vram_copy_slows * IN_VRAM
"""By what computes meanwhile."""
STREAMS = {"buffers": 2, "min_tokens": 512, "nbytes": 1, "fault": None}


def test_the_model_adds_the_missed_bytes_over_the_measured_rate_to_the_resident_time() -> None:
    found = compared(measured_run(0.02, None, size=1))
    assert found.way == "in place"
    assert found.predicted == pytest.approx(0.010 + 16 * 4 * EXPERT / 40e9, rel=0.1), "of 8 choices 4 miss, in 16 layers"
    moved = measured_run(0.02, None, size=1)
    moved["rows"][1]["points"][0]["moved_bytes"] = 55e6
    assert compared(moved).predicted == pytest.approx(found.predicted + 0.001)


@pytest.mark.parametrize(("kind", "size"), [("decode", 1), ("decode", 64), ("prefill", 512), ("prefill", 32000)])
def test_with_nothing_offloaded_the_model_says_what_was_measured(kind: str, size: int) -> None:
    served = model.Served(128, 0, model.IN_PLACE, 8192)
    figure = model.Figure(kind, size, size if kind == "prefill" else 64, served, 1.0, shape_of(**LARGE))
    for seconds in (0.001, 10.0):
        machine, assumed = figure.as_resident(seconds, RATES, model.machine_of(record_of([])))
        assert figure.seconds(figure.predict(RATES, machine, assumed)) == pytest.approx(seconds)


def test_the_hit_rate_is_what_the_server_counted_meanwhile() -> None:
    run = measured_run(0.02, 16 * 2 * EXPERT, size=1)
    run["rows"][1]["points"][0] |= {"routed": 128.0, "routed_resident": 112.0}
    assert compared(run).predicted == pytest.approx(0.010 + 16 * 1 * EXPERT / 40e9, rel=0.1), "1 of 8 choices misses"


def test_a_decode_step_whose_misses_fill_slots_takes_the_rate_of_copies() -> None:
    """And the time to decide in each layer, and to read from VRAM what was copied there."""
    slots = {"a_layer": 32, "missing": None}
    found = compared(measured_run(0.02, None, size=1, resident=0.0015, slots=slots))
    assert found.way == "slots"
    assert found.predicted == pytest.approx(0.0015 + 16 * (4 * EXPERT / 50e9 + Assumptions.slot_layer_us * 1e-6), rel=1e-3)


@pytest.mark.parametrize(
    ("resident", "expected"),
    [
        (0.016, 16 * COPY + 0.001),  # the link is the limit, until the last layer computes
        (1.6, 1.6 + COPY + 15 * LOST),  # only the first copy is waited for
    ],
)
def test_a_prompt_that_streams_takes_the_longer_of_computing_and_copying(resident: float, expected: float) -> None:
    found = compared(measured_run(1.0, None, 8192, "prefill", resident, streaming=STREAMS))
    assert found.way == "streamed"
    assert found.predicted == pytest.approx(expected, rel=0.02)


def test_a_prompt_of_several_chunks_streams_each_and_a_short_one_none() -> None:
    whole, twice = (compared(measured_run(1.0, None, size, "prefill", 0.01, streaming=STREAMS)) for size in (8192, 16384))
    assert twice.predicted == pytest.approx(2 * whole.predicted, rel=0.02)
    chunked = measured_run(1.0, None, 8192, "prefill", 0.01, streaming=STREAMS)
    chunked["rows"][1]["engine"] = {"chunked_prefill_size": 2048}
    assert compared(chunked).predicted == pytest.approx(4 * whole.predicted, rel=0.02), "as SGLang says of that server"
    chunked["rows"][1]["engine"]["chunked_prefill_size"] = None
    chunked["server_args"] = ["--chunked-prefill-size", "4096"]
    assert compared(chunked).predicted == pytest.approx(2 * whole.predicted, rel=0.02), "as its arguments say"
    assert compared(measured_run(1.0, None, 256, "prefill", streaming=STREAMS)).way == "in place"
    assert compared(measured_run(1.0, None, 8192, "prefill")).way == "in place"


def test_figures_that_are_off_by_more_than_a_tenth_are_counted() -> None:
    good = compared(measured_run(0.02, None))
    exact, slower = (compared(measured_run(times * good.predicted, None)) for times in (1, 3))
    assert model.lines([exact], RATES)[-1] == "0 of 1 figures are off by more than 10%"
    assert model.lines([exact, slower], RATES)[-1] == "1 of 2 figures are off by more than 10%"


def test_rates_come_from_the_session_where_it_measured_them() -> None:
    found = {"sequential": 44.0, "scattered": 43.0, "copied": 50.0, "engine": 54.0}
    rows = [{"row": "link", "of": of, "median": rate} for of, rate in found.items()]
    assumed = Assumptions()
    assert link_rates.rates_of([*rows, {"row": "link_pinned", "median": 60.0}], 60.0, assumed) == Rates(44.0, 50.0, 54.0)
    none = link_rates.rates_of([], 60.0, assumed)
    assert (none.read, none.copy, none.link) == (60 * assumed.read_efficiency, 60 * assumed.copy_efficiency, 60)
    assert none.assumed == ("read", "copy", "link")
    assert "copy rate 50 GB/s, measured by the session; link rate 54 GB/s" in str(Rates(44.0, 50.0, 54.0, ("read",)))


def test_a_run_on_a_cpu_has_nothing_to_compare() -> None:
    with pytest.raises(model.NothingToCompare, match="no GPU took part"):
        model.machine_of(record_of([], measured=False))


def test_a_run_on_several_gpus_has_nothing_to_compare() -> None:
    for words in (["--tp-size", "8"], ["--dp=2"]):
        with pytest.raises(model.NothingToCompare, match=f"given {words[0]}: servers of one GPU"):
            model.machine_of(record_of([]) | {"server_args": words})


def test_the_model_reads_a_run_and_a_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = measured_run(0.02, 1e8)
    run["model"]["config"] = make_checkpoint.FAMILIES["qwen3_moe"].config(make_checkpoint.Shape(**LARGE))
    run["model"]["config"]["torch_dtype"] = "bfloat16"
    (tmp_path / "run.json").write_text(json.dumps(run))
    out = tmp_path / "model" / "server"
    assert model.main([str(tmp_path), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "read rate 51.7 GB/s, assumed by the planner; copy rate" in said
    assert "first_n 50%" in said
    assert (out / "model.log").read_text() == said
    assert json.loads((out / "model.json").read_text())["measured"] is True
    served = [{"row": "run", "run": run | {"rows": []}}, *({"row": "cell", "cell": each} for each in run["rows"])]
    link = [{"row": "link", "of": "sequential", "median": 30.0}]
    section = {"measured": True, "parts": {"link": {"rows": link}, "most": {"rows": served}}}
    (tmp_path / "server.json").write_text(json.dumps(section))
    assert model.main([str(tmp_path / "server.json")]) == 0
    assert "read rate 30 GB/s, measured by the session" in capsys.readouterr().out
    assert model.main([str(tmp_path / "nothing")]) == 2
    assert "no such file" in capsys.readouterr().err

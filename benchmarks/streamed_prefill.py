"""A chunk of a prompt, streamed and read in place, on a modelled GPU that runs the shipped ``Streamer``.

    python -m benchmarks.streamed_prefill CONFIGS FOLDER_OF_TRACES [--out results/prefill]

CONFIGS is a folder with a config.json of each model, as for ``published.py``. The layers are real ``ExpertLayer`` objects of
the models' sizes whose bytes are never written, so they take no memory. The buffers are a ``ModelledStaging``: its copies take
modelled seconds on a stream of their own, and ``begin_step``, ``acquire`` and ``release`` order them against computing as CUDA
events do. So what is judged is the order that ships. Seconds of computing, launching and reading come from the planner; nothing
here was measured on a GPU but what the page names as measured.

    python -m benchmarks.streamed_prefill --host [--out results/prefill]

Instead measures what the ``Streamer`` adds to the host's work for a layer. Run it while the machine does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import serve_report
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.protocol import MemoryInfo
from sglang_uvm_offload.memory.staging import Part
from sglang_uvm_offload.routing.trace import Trace
from sglang_uvm_offload.sizing.checkpoint import from_config
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.layer_copy import LayerCopy, layer_copy
from sglang_uvm_offload.sizing.machine import Machine, preset
from sglang_uvm_offload.sizing.plan import Speed
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.rates import over_link, read_rate, stream_rates, vram_copy_rate
from sglang_uvm_offload.sizing.speed import distinct, predict
from sglang_uvm_offload.sizing.stage_cost import Stream
from sglang_uvm_offload.sizing.streaming import break_even_tokens
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer

HERE = Path(__file__).resolve().parent
SERVED = HERE / "results" / "2026-11-22-nvidia-h200" / "server.json"
CHUNKS = (512, 2048, 4096, 8192, 16384, 32768)
SHARES = (0.95, 0.78, 0.5)
SWEEP = tuple(1 << power for power in range(4, 16))
TRACES = ("dsv2lite-intent", "dsv2lite-summary", "dsv2lite-translation", "gpt-oss-20b-decode")
LIKE_CHUNKS = TRACES[:3]
"""Those whose rows stand for a chunk's: teacher-forced text."""
STEPS = tuple(1 << power for power in range(4, 11))
TIMES = (1, 2, 4, 8, 16, 32)
WINDOWS = 16
"""Of each trace, evenly spaced; they overlap where they are long."""
USED, CROSSED = 0.9, 1.0
WITHIN, WITHIN_FROM = 1.10, 2048
FASTER, FASTER_AT, FASTER_SHARE = 3.0, 8192, 0.5
HOST_LAYERS, HOST_TENSORS, HOST_STEPS, HOST_GOAL_US = 60, 8, 30, 1000.0


# ---- what is modelled ----


@dataclass(frozen=True)
class Served:
    """A model on a machine. ``file``: its config in CONFIGS, or the name of one in ``published.json``."""

    name: str
    file: str
    machine: str
    tp: int
    fp8: bool = False
    """Quantised, though the config is not."""

    def shape(self, configs: Path) -> CheckpointShape:
        inline = json.loads((HERE / "published.json").read_text())["models"]
        config = inline.get(self.file) or json.loads((configs / f"{self.file}.json").read_text())
        quantised = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}} if self.fp8 else {}
        return from_config(self.name, config.get("config", config) | quantised)


QWEN = Served("Qwen3-30B-A3B, 16 layers, 1 H200", "qwen3-30b-a3b-16-layers", "1xH200", 1)
MODELS = (
    Served("GLM-5 (FP8), 8 H20", "glm-5-fp8", "8xH20", 8),
    Served("GLM-4.5-Air in FP8, 4 4090", "glm-4.5-air", "4x4090", 4, fp8=True),
    Served("DeepSeek-V3 (FP8), 8 H200", "deepseek-v3", "8xH200", 8),
    QWEN,
)


@dataclass(frozen=True)
class Routing:
    """What a chunk's routing asks of ``num_resident`` residents."""

    hit_rate: float
    crossings: float
    """How often it brings an offloaded expert over the link in place, on average; 0 for those that it does not use."""


class Model:
    """One rank, as the planner sees it."""

    def __init__(self, served: Served, shape: CheckpointShape):
        self.served, self.shape = served, shape
        self.machine: Machine = preset(served.machine)
        self.parallel = Parallel(served.tp)
        self.assumed = Assumptions()
        self.case = Case(shape, self.machine, Workload(max(CHUNKS)), self.parallel, Reserve(), self.assumed)
        self.cost = self.case.cost(0)

    def break_even(self, num_resident: int) -> int:
        rates = stream_rates(self.machine, self.parallel, self.assumed)
        return break_even_tokens(self.shape.num_experts, self.shape.top_k, num_resident, rates)

    def residents(self, share: float) -> int:
        return round(share * self.shape.num_experts)

    @property
    def copy_rate(self) -> float:
        return over_link(self.machine, self.parallel, self.assumed, self.assumed.copy_efficiency)

    @property
    def read_rate(self) -> float:
        return read_rate(self.machine, self.parallel, self.assumed)

    @property
    def launching(self) -> float:
        """Host seconds of a layer."""
        assumed = self.assumed
        return 1e-3 * (assumed.latent_prefill_layer_ms if self.cost.latent_attention else assumed.prefill_layer_ms)

    def routing(self, num_resident: int, hit_rate: float, tokens: int) -> Routing:
        """As the planner takes it, if residents serve ``hit_rate`` of the uses."""
        offloaded = self.shape.num_experts - num_resident
        used = distinct(offloaded, self.shape.top_k * (1 - hit_rate), tokens) / offloaded
        return Routing(hit_rate, used * self.predicted(tokens, num_resident, hit_rate).reread)

    def predicted(
        self,
        tokens: int,
        num_resident: int,
        hit_rate: float,
        stream: Stream | None = None,
        link: float | None = None,
        launched: bool = True,
        experts: bool = True,
    ) -> Speed:
        """The planner's, for one chunk. ``launched``: with the time of launching; ``experts``: with the routed experts."""
        unlaunched = replace(self.assumed, prefill_layer_ms=0.0, latent_prefill_layer_ms=0.0)
        assumed = self.assumed if launched else unlaunched
        machine = self.machine if link is None else replace(self.machine, link_gbps=link, host_gbps=0.0)
        cost = self.cost if experts else replace(self.cost, expert_layers=())
        shape, work = self.shape, Workload(tokens, prompt_tokens=tokens)
        return predict(
            *("chunk", hit_rate, num_resident, shape.num_experts, shape.top_k, [cost], machine, work, self.parallel, 1),
            *(tokens, assumed, stream or Stream(0, 0)),
        )

    def between(self, tokens: int) -> float:
        """Seconds of a layer without its routed experts, all in VRAM."""
        return self.predicted(tokens, self.shape.num_experts, 1.0, launched=False, experts=False).prefill_chunk_s / self.layers

    def experts_resident(self, tokens: int) -> float:
        """Seconds of a layer's routed experts, all in VRAM."""
        whole = self.predicted(tokens, self.shape.num_experts, 1.0, launched=False).prefill_chunk_s
        return (whole - self.layers * self.between(tokens)) / self.moe_layers

    def experts_in_place(self, tokens: int, num_resident: int, routing: Routing) -> float:
        """Seconds of a layer's routed experts if offloaded ones are read in place."""
        vram = self.predicted(tokens, num_resident, routing.hit_rate, link=math.inf, launched=False).prefill_chunk_s
        offloaded = (self.shape.num_experts - num_resident) * self.cost.expert_layers[0]
        return (vram - self.layers * self.between(tokens)) / self.moe_layers + routing.crossings * offloaded / self.read_rate

    @property
    def layers(self) -> int:
        return self.cost.layers

    @property
    def moe_layers(self) -> int:
        return len(self.cost.expert_layers)


# ---- the GPU ----


class Gpu:
    """When each of its streams has done all that it was given, in seconds, and when the host has launched it."""

    def __init__(self) -> None:
        self.host = self.computed = self.copied = 0.0

    def compute(self, seconds: float, launching: float) -> None:
        """Kernels that the host launches one after the other, while those before them run."""
        begin = max(self.computed, self.host)
        self.host += launching
        self.computed = max(begin + seconds, self.host)


class ModelledStaging:
    """``Staging`` on a ``Gpu``. Raises if bytes are overwritten while they are read, or read before they are there."""

    def __init__(self, gpu: Gpu, layers: Sequence[ExpertLayer], count: int, copy_rate: float, vram_rate: float):
        """A copy brings offloaded bytes at ``copy_rate``, and meanwhile resident ones at ``vram_rate``."""
        self._gpu = gpu
        self._seconds = {
            tensor.managed: np.array([tensor.offloaded_bytes.sum() / copy_rate, tensor.resident_bytes / vram_rate])
            for layer in layers
            for tensor in layer.tensors
        }
        self.buffers = [torch.empty(max(map(buffer_bytes, layers)), dtype=torch.uint8) for _ in range(count)]
        self._filled, self._read = [0.0] * count, [0.0] * count
        self.copies = 0

    def may_copy(self) -> bool:
        return True

    def begin_step(self) -> None:
        self._gpu.copied = max(self._gpu.copied, self._gpu.computed)

    def copy(
        self, buffer: int, parts: Sequence[Part], slots: torch.Tensor | None = None, in_vram: Sequence[np.ndarray] = ()
    ) -> None:
        begin = max(self._gpu.copied, self._gpu.host)
        if begin < self._read[buffer]:
            raise RuntimeError(f"buffer {buffer} is filled from {begin} s on, and read until {self._read[buffer]} s")
        self._gpu.copied = self._filled[buffer] = begin + float(
            np.sum([self._seconds[part.managed] for part in parts], axis=0).max()
        )
        self._read[buffer] = math.inf  # until its reader has left
        self.copies += 1

    def acquire(self, buffer: int) -> None:
        self._gpu.computed = max(self._gpu.computed, self._filled[buffer])

    def release(self, buffer: int) -> None:
        self._read[buffer] = self._gpu.computed
        self._gpu.copied = max(self._gpu.copied, self._gpu.computed)


class Unwritten(EmulatedMemory):
    """Memory for any number of bytes that nobody writes."""

    def info(self) -> MemoryInfo:
        return MemoryInfo(1 << 60, 1 << 60, 1 << 60)


def expert_layers(tensors: Sequence[Sequence[int]], num_experts: int, num_resident: int) -> list[ExpertLayer]:
    """A layer for each list of its tensors' bytes an expert, its first ``num_resident`` experts resident."""
    memory, made = Unwritten(BLOCK_BYTES), []
    chosen = np.arange(num_experts) < num_resident
    for index, sizes in enumerate(tensors):
        layer = ExpertLayer(memory, LayerShard(index, num_experts), lambda layout: layout.holding(chosen))
        module = torch.nn.Module()
        with AllocationMode(num_experts, layer.allocate):
            for number, nbytes in enumerate(sizes):
                weight = torch.empty(num_experts, nbytes, dtype=torch.uint8)
                setattr(module, f"weight{number}", torch.nn.Parameter(weight, requires_grad=False))
        layer.sync_tensors(module)
        made.append(layer)
    return made


def chunk_seconds(model: Model, tokens: int, experts: float, streamer: Streamer | None = None, gpu: Gpu | None = None) -> float:
    """A chunk on an idle GPU. ``experts``: of a layer's routed experts. Half of a layer's launches are its experts'."""
    gpu, between, launching = gpu or Gpu(), model.between(tokens), model.launching / 2
    begun, row = gpu.computed, 0
    if streamer is not None:
        if not streamer.streams(tokens):
            raise RuntimeError(f"{tokens} tokens do not stream: {streamer.fault}")
        streamer.begin_step()
    for layer in model.case.decoder_layers(0):
        gpu.compute(between, launching)
        reading = streamer.enter(row) if streamer is not None and layer.experts else None
        gpu.compute(experts if layer.experts else 0.0, launching)
        if streamer is not None and reading is not None:
            streamer.leave(reading)
        row += bool(layer.experts)
    if streamer is not None:
        streamer.end_step()
        if streamer.fault is not None:
            raise RuntimeError(streamer.fault)
    return gpu.computed - begun


class Offloaded:
    """A model with ``share`` of its experts resident, and its layers."""

    def __init__(self, model: Model, share: float):
        self.model, self.num_resident = model, model.residents(share)

    @cached_property
    def layers(self) -> list[ExpertLayer]:
        case = self.model.case
        sizes = [[n for n, placed in case.expert_tensors(layer) if placed] for layer in case.decoder_layers(0) if layer.experts]
        return expert_layers(sizes, self.model.shape.num_experts, self.num_resident)

    @cached_property
    def copies(self) -> list[LayerCopy]:
        model = self.model
        return [
            layer_copy(layer.offloaded_bytes, layer.resident_bytes, model.copy_rate, model.machine, model.assumed)
            for layer in self.layers
        ]

    def resident(self, tokens: int) -> float:
        return chunk_seconds(self.model, tokens, self.model.experts_resident(tokens))

    def streamed(self, tokens: int, buffers: int) -> float:
        gpu, model = Gpu(), self.model
        staging = ModelledStaging(gpu, self.layers, buffers, model.copy_rate, vram_copy_rate(model.machine, model.assumed))
        streamer = Streamer(self.layers, staging, 1, lambda row, nbytes: None)
        experts = model.experts_resident(tokens) + statistics.fmean(copy.slows(model.assumed) for copy in self.copies)
        return chunk_seconds(model, tokens, experts, streamer, gpu)

    def in_place(self, tokens: int, routing: Routing) -> float:
        return chunk_seconds(self.model, tokens, self.model.experts_in_place(tokens, self.num_resident, routing))


# ---- measured routing ----


class Measured:
    """A trace whose first half chose the residents. Windows are of its second half."""

    def __init__(self, name: str, trace: Trace):
        self.name, self.num_experts, self.top_k = name, trace.num_experts, int(trace.ids.shape[2])
        tokens = int(trace.seq_len[trace.split(0.5)[0]].sum())
        self._counts = self.rows(trace.ids[:tokens])
        self.ids = trace.ids[tokens:]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """``[layers, experts]``: the rows of each expert if the tokens are one step's."""
        layers = ids.shape[1]
        flat = (ids.astype(np.int64) + np.arange(layers)[:, None] * self.num_experts).ravel()
        return np.bincount(flat, minlength=layers * self.num_experts).reshape(layers, self.num_experts)

    def offloaded(self, share: float) -> np.ndarray:
        """``bool[layers, experts]``: all but the most used."""
        order = np.argsort(-self._counts, axis=1, kind="stable")
        offloaded = np.ones(self._counts.shape, dtype=bool)
        np.put_along_axis(offloaded, order[:, : round(share * self.num_experts)], False, axis=1)
        return offloaded

    def windows(self, tokens: int, spread: bool) -> list[np.ndarray]:
        """The rows of steps of ``tokens`` tokens that follow each other, or lie anywhere in the half."""
        if tokens > len(self.ids):
            return []
        if spread:
            rng = np.random.default_rng(tokens)
            return [self.rows(self.ids[rng.permutation(len(self.ids))[:tokens]]) for _ in range(WINDOWS)]
        begins = np.linspace(0, len(self.ids) - tokens, WINDOWS).astype(int)
        return [self.rows(self.ids[begin : begin + tokens]) for begin in begins]

    def routing(self, tokens: int, share: float, rows_per_read: int) -> Routing | None:
        """Of steps of ``tokens`` tokens that follow each other; None if the half is shorter."""
        offloaded, windows = self.offloaded(share), self.windows(tokens, spread=False)
        if not windows:
            return None
        missed = statistics.fmean(rows[offloaded].sum() / rows.sum() for rows in windows)
        return Routing(1 - missed, statistics.fmean(blocks(rows[offloaded], rows_per_read).mean() for rows in windows))


def blocks(rows: np.ndarray, rows_per_read: int) -> np.ndarray:
    return -(-rows // rows_per_read)


def like_chunk(traces: Sequence[Measured], model: Model, tokens: int, share: float) -> Routing | None:
    """The mean over traces, each in steps with as many rows an expert as ``tokens`` tokens give the model."""
    found = []
    for trace in traces:
        per_token = model.shape.top_k / model.shape.num_experts * trace.num_experts / trace.top_k
        found.append(trace.routing(max(1, round(tokens * per_token)), share, model.assumed.rows_per_read))
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return Routing(statistics.fmean(each.hit_rate for each in known), statistics.fmean(each.crossings for each in known))


# ---- the figures ----


@dataclass(frozen=True)
class Row:
    """A chunk. Milliseconds."""

    model: str
    share: float
    tokens: int
    streams: bool
    """By default: whether it has as many tokens as ``auto`` asks for."""
    resident: float
    copying: float
    """All offloaded bytes over the copy's rate."""
    in_vram: float
    """All resident bytes over the rate of copies in VRAM."""
    two: float
    one: float
    in_place: float
    traced: float | None
    """In place, by measured routing; None where no trace is long enough."""
    planned: float
    """Two buffers, by the planner's formula."""

    @property
    def over_bound(self) -> float:
        return self.two / max(self.resident, self.copying)


def row(offloaded: Offloaded, share: float, tokens: int, traced: Routing | None) -> Row:
    model, residents = offloaded.model, offloaded.num_resident
    uniform = residents / model.shape.num_experts
    seconds = {
        "resident": offloaded.resident(tokens),
        "copying": sum(copy.link for copy in offloaded.copies),
        "in_vram": sum(copy.vram for copy in offloaded.copies),
        "two": offloaded.streamed(tokens, 2),
        "one": offloaded.streamed(tokens, 1),
        "in_place": offloaded.in_place(tokens, model.routing(residents, uniform, tokens)),
        "traced": None if traced is None else offloaded.in_place(tokens, traced),
        "planned": model.predicted(tokens, residents, uniform, Stream(2, 0)).prefill_chunk_s,
    }
    milliseconds: dict[str, Any] = {name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()}
    return Row(model.served.name, share, tokens, tokens >= model.break_even(residents), **milliseconds)


def rows_of(model: Model, traces: Sequence[Measured]) -> list[Row]:
    found = []
    for share in SHARES:
        offloaded = Offloaded(model, share)
        for tokens in sorted({*SWEEP, *CHUNKS}):
            found.append(row(offloaded, share, tokens, like_chunk(traces, model, tokens, share)))
    return found


@dataclass(frozen=True)
class Check:
    """A prompt that was measured beside the model's. Milliseconds."""

    tokens: int
    measured_resident: float
    measured: float
    resident: float
    in_place: float

    @property
    def added(self) -> float:
        """What reading in place adds, modelled over measured."""
        return (self.in_place - self.resident) / (self.measured - self.measured_resident)


def checks(model: Model) -> list[Check]:
    """Prefill of the served checkpoint, in place with half of its experts resident, at the hit rate that was counted."""
    record = serve_report.load(SERVED)
    (cell,) = [cell for cell in serve_report.cells(record) if cell == ("frequency", 0.5)]
    offloaded = Offloaded(model, cell[1])
    hit_rate = statistics.median(each["offload"]["hit_rate"] for each in serve_report.rows_of(record, cell) if each["offload"])
    words = record["server_args"]
    chunk = int(words[words.index("--chunked-prefill-size") + 1])
    found = []
    for tokens in serve_report.sizes(record, "prefill"):
        parts = [min(chunk, tokens - begin) for begin in range(0, tokens, chunk)]
        resident = sum(offloaded.resident(part) for part in parts)
        in_place = sum(offloaded.in_place(part, model.routing(offloaded.num_resident, hit_rate, part)) for part in parts)
        samples = (serve_report.samples(record, each, "prefill", tokens) for each in (serve_report.RESIDENT, cell))
        measured = (1e3 * statistics.median(each) for each in samples)
        found.append(Check(tokens, *(round(value, 3) for value in (*measured, 1e3 * resident, 1e3 * in_place))))
    return found


@dataclass(frozen=True)
class Threshold:
    """By measured routing, for each of ``STEPS``."""

    trace: str
    share: float
    spread: bool
    """Tokens from anywhere in the half, not one after the other."""
    auto: int
    used: tuple[float, ...]
    """The share of offloaded experts that a step reads in place at least once: of their bytes too, for all are alike."""
    crossings: tuple[float, ...]
    """Reads of all offloaded experts, by blocks of rows, over their number."""

    def first(self, figures: Sequence[float], least: float) -> int | None:
        return next((tokens for tokens, figure in zip(STEPS, figures, strict=True) if figure >= least), None)


def threshold(trace: Measured, share: float, spread: bool) -> Threshold:
    offloaded, used, crossings = trace.offloaded(share), [], []
    for tokens in STEPS:
        rows = [each[offloaded] for each in trace.windows(tokens, spread)]
        used.append(round(statistics.fmean(float((each > 0).mean()) for each in rows), 4))
        crossings.append(round(statistics.fmean(float(blocks(each, Assumptions().rows_per_read).mean()) for each in rows), 4))
    auto = break_even_tokens(trace.num_experts, trace.top_k)
    return Threshold(trace.name, share, spread, auto, tuple(used), tuple(crossings))


@dataclass(frozen=True)
class Auto:
    """From how many tokens on a model streams by default."""

    model: str
    share: float
    tokens: int


@dataclass(frozen=True)
class Figures:
    """All of the page."""

    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    thresholds: tuple[Threshold, ...]
    auto: tuple[Auto, ...]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Figures:
        return cls(
            tuple(Row(**each) for each in record["rows"]),
            tuple(Check(**each) for each in record["checks"]),
            tuple(
                Threshold(**each | {name: tuple(each[name]) for name in ("used", "crossings")}) for each in record["thresholds"]
            ),
            tuple(Auto(**each) for each in record["auto"]),
        )


def figures(configs: Path, folder: Path) -> Figures:
    traces = [Measured(name, Trace.load(folder / f"{name}.npz")) for name in TRACES]
    models = [Model(served, served.shape(configs)) for served in MODELS]
    like = [trace for trace in traces if trace.name in LIKE_CHUNKS]
    return Figures(
        tuple(each for model in models for each in rows_of(model, like)),
        tuple(checks(next(model for model in models if model.served == QWEN))),
        tuple(threshold(trace, share, spread) for trace in traces for share in SHARES for spread in (False, True)),
        tuple(Auto(model.served.name, share, model.break_even(model.residents(share))) for model in models for share in SHARES),
    )


# ---- goals ----


@dataclass(frozen=True)
class Goal:
    what: str
    met: int
    of: int
    worst: str

    def line(self) -> str:
        verdict = "met" if self.met == self.of else "**missed**"
        return f"| {self.what} | {self.met} of {self.of} | {verdict} | {self.worst} |"


def goal(what: str, judged: Sequence[tuple[Row, float]], limit: float, at_least: bool) -> Goal:
    """``judged``: rows with the ratio that is to be ``at_least`` the limit, or at most."""
    worst, ratio = (min if at_least else max)(judged, key=lambda each: each[1])
    met = sum(value >= limit if at_least else value <= limit for _, value in judged)
    where = f"{ratio:.2f}: {worst.model}, {worst.share:.0%}, {worst.tokens} tokens"
    return Goal(what, met, len(judged), where)


def goals(found: Figures) -> list[Goal]:
    long = [each for each in found.rows if each.tokens in CHUNKS and each.tokens >= WITHIN_FROM]
    auto = [each for each in found.rows if each.streams]
    at = [each for each in found.rows if (each.tokens, each.share) == (FASTER_AT, FASTER_SHARE)]
    sizes = f"{WITHIN_FROM} to {max(CHUNKS)} tokens"
    bound = f"at most {WITHIN:.2f} of max(resident, copying), {sizes}"
    faster = f"in place / streamed at least {FASTER:g} at {FASTER_AT} tokens and {FASTER_SHARE:.0%}"
    slower = "never slower than in place from `auto` on"
    return [
        goal(bound, [(each, each.over_bound) for each in long], WITHIN, False),
        goal(f"{slower}, uniform routing", [(each, each.in_place / each.two) for each in auto], 1, True),
        goal("the same, `traced`", gains(auto), 1, True),
        goal(f"{faster}, uniform routing", [(each, each.in_place / each.two) for each in at], FASTER, True),
        goal("the same, `traced`", gains(at), FASTER, True),
    ]


def gains(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """In place by measured routing over streamed, where it is known."""
    return [(each, each.traced / each.two) for each in rows if each.traced is not None]


def worst_choice(found: Figures, times: int, traced: bool) -> float:
    """If chunks streamed from ``times`` as many tokens as ``auto`` asks for: the longest time over the better of the two."""
    worst, auto = 1.0, {(each.model, each.share): each.tokens for each in found.auto}
    for each in found.rows:
        in_place = each.traced if traced else each.in_place
        if in_place is not None:
            chosen = each.two if each.tokens >= times * auto[each.model, each.share] else in_place
            worst = max(worst, chosen / min(each.two, in_place))
    return worst


def wins_from(rows: Sequence[Row], traced: bool) -> int | None:
    """The fewest tokens from which on, as far as is known, streaming with two buffers is not slower."""
    known = [(each.tokens, each.traced if traced else each.in_place, each.two) for each in rows]
    losing = [tokens for tokens, in_place, two in known if in_place is not None and two > in_place]
    return next((tokens for tokens, _, _ in known if tokens > max(losing, default=0)), None)


# ---- output ----


def ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def page(found: Figures) -> str:
    planned, rows_per_read = [each.two / each.planned for each in found.rows], Assumptions().rows_per_read
    lines = [
        "# Prefill: streamed, and read in place",
        "",
        *wrapped(
            "Made by `benchmarks/streamed_prefill.py`: a modelled GPU runs the shipped order of copies. Nothing here was "
            "measured but the traces and the columns that say so. Computing, launching, the rates of copies and what a copy "
            "takes from a MoE are the planner's. In place, an offloaded expert is read once for each block of "
            f"{rows_per_read} rows: the planner's assumption, fitted to one measured prefill. Each chunk finds an idle "
            "GPU, so that the copy for its first layer is waited for."
        ),
        "",
        *wrapped(
            f"Over all {len(planned)} chunks, two buffers take {min(planned):.3f} to {max(planned):.3f} of the time that "
            "the planner predicts for them: its copies begin with the layer before, and here the one for a chunk's second "
            "layer may begin earlier."
        ),
        "",
        "## Goals",
        "",
        "| streamed, two buffers | chunks that meet it | verdict | worst |",
        "| --- | --- | --- | --- |",
        *(each.line() for each in goals(found)),
        "",
        *wrapped(
            "Where the link is the limit, streaming gains at most as many times as an expert is read in place: its rows "
            f"over {rows_per_read}, and half a block."
        ),
        "",
        "## Milliseconds of a chunk",
        "",
        *wrapped(
            "`resident`: every expert in VRAM. `copying`: all offloaded bytes at the copy's rate. `in VRAM`: all resident "
            "bytes at the rate of copies in VRAM. `two`, `one`: streamed with so many buffers. `in place`: by uniform "
            f"routing; `traced`: by that of the traces {', '.join(LIKE_CHUNKS)}, in steps with as many rows an expert, "
            "while the half of a trace is long enough."
        ),
    ]
    for name in dict.fromkeys(each.model for each in found.auto):
        mine = [each for each in found.rows if each.model == name]
        lines += ["", f"### {name}", ""]
        lines += [
            "| resident | tokens | resident | copying | in VRAM | two | one | in place | traced | two / max(resident, copying) "
            "| in place / two |",
            "| --- " * 11 + "|",
        ]
        for each in (each for each in mine if each.tokens in CHUNKS):
            times = (each.resident, each.copying, each.in_vram, each.two, each.one, each.in_place, each.traced)
            ratios = f"{each.over_bound:.2f} | {each.in_place / each.two:.2f}"
            lines.append(f"| {each.share:.0%} | {each.tokens} | {' | '.join(map(ms, times))} | {ratios} |")
    return "\n".join([*lines, *threshold_part(found), *measured_part(found)]) + "\n"


def threshold_part(found: Figures) -> list[str]:
    lines = [
        "",
        "## From how many tokens on",
        "",
        *wrapped(
            "The fewest tokens (a power of two) from which on streaming with two buffers is not slower than reading in "
            "place, and how it compares with as many as `auto` asks for: time streamed over time in place."
        ),
        "",
        "| model | resident | `auto` | uniform | traced | at `auto`, uniform | at `auto`, traced |",
        "| --- " * 7 + "|",
    ]
    for name, share, auto in map(astuple, found.auto):
        mine = [each for each in found.rows if (each.model, each.share) == (name, share)]
        at = next(each for each in mine if each.tokens == auto)
        ratios = f"{at.two / at.in_place:.2f} | {'-' if at.traced is None else f'{at.two / at.traced:.2f}'}"
        lines.append(f"| {name} | {share:.0%} | {auto} | {wins_from(mine, False)} | {wins_from(mine, True)} | {ratios} |")
    lines += [
        "",
        *wrapped(
            f"If `auto` were so many times what it is: the worst time over that of the better way, from {min(SWEEP)} "
            "tokens on, over all models and shares."
        ),
        "",
        "| times | uniform | traced |",
        "| --- | --- | --- |",
        *(f"| {times} | {worst_choice(found, times, False):.2f} | {worst_choice(found, times, True):.2f} |" for times in TIMES),
        "",
        *wrapped(
            "By the traces themselves: the share of offloaded bytes that a step of so many tokens reads in place at "
            f"least once, then the tokens from which on it is {USED:.0%}, and from which on a step reads as many bytes as "
            f"there are (blocks of {Assumptions().rows_per_read} rows). Residents are the most used of the first half; "
            "steps are of the second: tokens that follow each other, or from anywhere in it (as from many requests)."
        ),
        "",
        f"| trace | resident | tokens | {' | '.join(map(str, STEPS))} | `auto` | {USED:.0%} used | all bytes |",
        "| --- " * (6 + len(STEPS)) + "|",
    ]
    for each in found.thresholds:
        used = " | ".join(f"{share:.2f}" for share in each.used)
        firsts = (each.first(each.used, USED), each.first(each.crossings, CROSSED))
        ends = " | ".join("-" if first is None else str(first) for first in firsts)
        where = "anywhere" if each.spread else "in order"
        lines.append(f"| {each.trace} | {each.share:.0%} | {where} | {used} | {each.auto} | {ends} |")
    return lines


def measured_part(found: Figures) -> list[str]:
    lines = [
        "",
        "## Measured beside modelled",
        "",
        *wrapped(
            f"{QWEN.name}, half resident, read in place: milliseconds of one prompt, measured in [this "
            "run](../2026-11-22-nvidia-h200/report/report.md) before streaming was built, and modelled in chunks as "
            "there, at the hit rate that it counted. The planner's rows for each read are fitted to it. Measured times "
            "include HTTP and a sampled token. The model has no attention that grows with the square of the prompt, so "
            "what counts is the time that reading in place *adds*."
        ),
        "",
        "| tokens | resident, measured | modelled | in place, measured | modelled | added, modelled / measured |",
        "| --- " * 6 + "|",
    ]
    for each in found.checks:
        times = (each.measured_resident, each.resident, each.measured, each.in_place)
        lines.append(f"| {each.tokens} | {' | '.join(map(ms, times))} | {each.added:.2f} |")
    return lines


# ---- the host ----


class NoStaging:
    """Buffers without copies, and so without anything to order."""

    def __init__(self, nbytes: int):
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(2)]

    def may_copy(self) -> bool:
        return True

    def begin_step(self) -> None: ...

    def copy(
        self, buffer: int, parts: Sequence[Part], slots: torch.Tensor | None = None, in_vram: Sequence[np.ndarray] = ()
    ) -> None: ...

    def acquire(self, buffer: int) -> None: ...

    def release(self, buffer: int) -> None: ...


@dataclass(frozen=True)
class Host:
    """Microseconds that ``enter`` and ``leave`` of one layer take together, over the layers of a step."""

    layers: int
    tensors: int
    steps: int
    best: float
    median: float


def host_time(num_layers: int = HOST_LAYERS, tensors: int = HOST_TENSORS, steps: int = HOST_STEPS) -> Host:
    layers = expert_layers([[BLOCK_BYTES] * tensors] * num_layers, 8, 4)
    streamer = Streamer(layers, NoStaging(max(map(buffer_bytes, layers))), 1, lambda row, nbytes: None)
    times = []
    for _ in range(steps + 1):  # the first one makes the replicas
        begin = time.perf_counter()
        streamer.begin_step()
        for index in range(num_layers):
            reading = streamer.enter(index)
            assert reading is not None
            streamer.leave(reading)
        streamer.end_step()
        times.append(1e6 * (time.perf_counter() - begin) / num_layers)
    return Host(num_layers, tensors, steps, round(min(times[1:]), 1), round(statistics.median(times[1:]), 1))


def host_page(host: Host, machine: str) -> str:
    verdict = "met" if host.best <= HOST_GOAL_US else "**missed**"
    lines = [
        "# What streaming adds to the host's work",
        "",
        *wrapped(
            f"Made by `benchmarks/streamed_prefill.py --host` on {machine}: the `Streamer` enters and leaves "
            f"{host.layers} layers of {host.tensors} parameters, with a staging that does nothing. Microseconds a layer "
            f"over {host.steps} steps."
        ),
        "",
        "| best | median | goal of the best | verdict |",
        "| --- | --- | --- | --- |",
        f"| {host.best:.0f} | {host.median:.0f} | {HOST_GOAL_US:.0f} | {verdict} |",
    ]
    return "\n".join(lines) + "\n"


def measure_host(out: Path) -> None:
    machine = f"{os.cpu_count()} cores of {platform.machine()}, Python {platform.python_version()}, PyTorch {torch.__version__}"
    host = host_time()
    print(host)
    (out / "host.json").write_text(json.dumps({"machine": machine, "host": asdict(host)}, indent=1) + "\n")
    (out / "host.md").write_text(host_page(host, machine))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="?")
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "prefill")
    wanted = parser.parse_args(arguments)
    wanted.out.mkdir(parents=True, exist_ok=True)
    if wanted.host:
        measure_host(wanted.out)
        return
    if wanted.traces is None:
        parser.error("give the folder of configs and the folder of traces")
    found = figures(wanted.configs, wanted.traces)
    (wanted.out / "prefill.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    (wanted.out / "prefill.md").write_text(page(found))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Replaying a routing trace through the real manager over emulated memory, beside reference policies.

A step is served as a whole: what it touches is looked up in the residency that it began with. The first part of the requests
warms up, the rest is scored, and state persists. Policies that read a miss through pay its bytes each time; caches that page
move it once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sglang_uvm_offload import references
from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.expert_layer import ExpertLayer
from sglang_uvm_offload.layout import PAGE_BYTES
from sglang_uvm_offload.manager import OffloadManager
from sglang_uvm_offload.references import Served
from sglang_uvm_offload.routing import CpuRoutingCounters, IdFormat, Phase
from sglang_uvm_offload.trace import Trace
from sglang_uvm_offload.uvm_host import HostMemory

SHIPPED = "adaptive"
POLICIES = (*references.NAMES, SHIPPED)
EXPERT_BYTES = 4 << 20
"""What an expert is taken to weigh where nobody says: it scales the bytes and seconds of every policy alike."""


@dataclass(frozen=True)
class Replay:
    """One policy's result over the scored steps. ``coverage``: the share of touches that VRAM served. Bytes and seconds are
    those of the link: reads plus moves."""

    policy: str
    residency: float
    batch: int
    coverage: float
    moves_per_step: float
    read_bytes_per_step: float
    moved_bytes_per_step: float
    step_seconds: float
    per_layer_coverage: list[float]
    coverage_over_time: list[float]
    """Coverage of each of up to 100 equal spans of the scored steps."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Managed:
    """The shipped policy: the real manager, continuous, fed the trace's ids as a model's steps would feed it."""

    def __init__(self, trace: Trace, num_resident: int, per_layer: str):
        config = OffloadConfig(
            num_resident=str(num_resident), resident_selection="first_n", adapt="continuous", per_layer=per_layer
        )
        self._ids = trace.ids
        self._manager = OffloadManager(
            config, HostMemory(), CpuRoutingCounters, lambda decide: decide(), progress=lambda: False, clock=_Idle()
        )
        self._model = self._manager.begin_model(draft=False)
        self._held: list[torch.Tensor] = []
        for layer_id in range(trace.num_layers):
            layer = self._manager.add_layer(self._model, layer_id, trace.num_experts, 0, 0, 1)
            flat = layer.allocate(PAGE_BYTES, torch.device("cpu"), "a page an expert")
            assert flat is not None
            self._held.append(flat)
        self._manager.finish_model(self._model)

    @property
    def layers(self) -> list[ExpertLayer]:
        return self._model.layers

    def step(self, tokens: np.ndarray, touched: np.ndarray) -> Served:
        """Serve the tokens (rows of the trace's ids, -1: an idle slot); ``touched`` is what they use."""
        rows = tokens[tokens >= 0]
        before = self._resident()
        self._manager.begin_step(self._model, len(rows), len(rows), Phase.DECODE)
        resident = self._resident()
        ids = torch.from_numpy(self._ids[rows])
        for layer in range(len(self.layers)):
            assert self._model.counters is not None
            self._model.counters.count(layer, ids[:, layer], 0, IdFormat.PLAIN)
        self._manager.end_step(self._model)
        return Served(touched & resident, touched & ~resident, resident & ~before)

    def _resident(self) -> np.ndarray:
        return np.stack([layer.resident for layer in self.layers])


class _Idle:
    """A clock on which there is always time to move: the link model says what moves cost."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e6
        return self._now


def replay(
    trace: Trace,
    policy: str,
    residency: float,
    batch: int = 1,
    per_layer: str = "uniform",
    warmup_fraction: float = 0.5,
    link_gbps: float = 50.0,
    expert_bytes: int = EXPERT_BYTES,
) -> Replay:
    """Serve ``trace`` with ``residency`` (0..1) of each layer's experts resident, ``batch`` requests at once, over a link of
    ``link_gbps`` 10^9 bytes a second. ``per_layer`` concerns the shipped policy. Raises ``ValueError`` for what cannot be
    replayed."""
    if not 0 <= residency <= 1:
        raise ValueError(f"the residency must be 0..1, not {residency}")
    if not link_gbps > 0:
        raise ValueError(f"the link's bandwidth must be above 0 GB/s, not {link_gbps}")
    parts = [trace.steps(part, batch) for part in trace.split(warmup_fraction)]
    if not len(parts[1]):
        raise ValueError(f"a warm-up of {warmup_fraction} leaves no request to score")
    num_resident = round(residency * trace.num_experts)
    if policy == SHIPPED:
        managed = Managed(trace, num_resident, per_layer)
        serve = managed.step
    else:
        touched = [trace.touched(part) for part in parts]
        capacity = np.full(trace.num_layers, num_resident)
        reference = references.make(policy, touched[0], touched[1], capacity)

        def serve(tokens: np.ndarray, touched: np.ndarray) -> Served:
            return reference.step(touched)

    hits, reads, moves, touches = [], 0, 0, np.zeros(trace.num_layers, dtype=np.int64)
    for scored, part in zip((False, True), parts, strict=True):
        for tokens, touched_now in zip(part, trace.touched(part), strict=True):
            served = serve(tokens, touched_now)
            if scored:
                hits.append((served.hit.sum(axis=1), touched_now.sum()))
                touches += touched_now.sum(axis=1)
                reads += int(served.read.sum())
                moves += int(served.moved.sum())
    steps = len(parts[1])
    by_layer = np.sum([hit for hit, _ in hits], axis=0)
    spans = np.array_split(np.array([(hit.sum(), touched_now) for hit, touched_now in hits]), min(100, steps))
    return Replay(
        policy=policy,
        residency=residency,
        batch=batch,
        coverage=float(by_layer.sum() / max(touches.sum(), 1)),
        moves_per_step=moves / steps,
        read_bytes_per_step=reads * expert_bytes / steps,
        moved_bytes_per_step=moves * expert_bytes / steps,
        step_seconds=(reads + moves) * expert_bytes / steps / (link_gbps * 1e9),
        per_layer_coverage=(by_layer / np.maximum(touches, 1)).tolist(),
        coverage_over_time=[float(span[:, 0].sum() / max(span[:, 1].sum(), 1)) for span in spans],
    )

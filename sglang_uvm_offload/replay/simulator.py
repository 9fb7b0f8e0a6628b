"""Replays a routing trace through the real manager over emulated memory, and through baseline policies.

A step is served as a whole, with the residency at its start. The first part of the requests warms up, the rest is scored, and
state persists between them. Policies that read misses in place pay their bytes each time; caches move them once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.policy.ranking import top
from sglang_uvm_offload.replay import baselines
from sglang_uvm_offload.replay.baselines import ReplayPolicy, Served
from sglang_uvm_offload.replay.policies import EXPERT_BYTES, LINK_GBPS, SHIPPED, SLOTS
from sglang_uvm_offload.replay.results import Replay, Scope, Split
from sglang_uvm_offload.replay.slot_splits import SHARES, SlotCache
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.routing.counts import IdFormat, Phase
from sglang_uvm_offload.routing.trace import Trace


@dataclass(frozen=True)
class Workload:
    """One trace at one batch size: the experts that each warm-up step and each scored step uses, ``bool[steps, layers,
    experts]``. Layers without routing are left out."""

    batch: int
    warmup: np.ndarray
    scored: np.ndarray
    routing: np.ndarray | None = None
    """``bool[layers of the trace]``: the layers included; None for all."""

    @classmethod
    def of(cls, trace: Trace, batch: int = 1, warmup_fraction: float = 0.5) -> Workload:
        """The workload with ``batch`` concurrent requests. The first ``warmup_fraction`` of the requests warms up. Raises
        ``ValueError`` if none is left to score."""
        warmup, scored = (trace.activated(trace.steps(part, batch)) for part in trace.split(warmup_fraction))
        if not len(scored):
            raise ValueError(f"a warm-up of {warmup_fraction} leaves no request to score")
        routing = np.logical_or(warmup.any(axis=(0, 2)), scored.any(axis=(0, 2)))
        if not routing.any():
            raise ValueError("no token uses any expert")
        if routing.all():
            return cls(batch, warmup, scored)
        return cls(batch, warmup[:, routing], scored[:, routing], routing)

    @property
    def shape(self) -> tuple[int, int]:
        """(layers, experts per layer)"""
        return self.scored.shape[1], self.scored.shape[2]

    def capacity(self, residency: float) -> np.ndarray:
        """Residents per layer, ``int[layers]``, for a ``residency`` (0..1) share of the experts."""
        return np.full(self.shape[0], round(residency * self.shape[1]))

    def policy(self, name: str, residency: float) -> ReplayPolicy:
        """The shipped policy, slots, or a baseline. Each object serves one replay."""
        capacity = self.capacity(residency)
        if name == SHIPPED:
            return Managed(self.shape, int(capacity[0]))
        if name == SLOTS:
            return SlotCache(self.shape, int(capacity[0]), np.zeros(self.shape, dtype=bool))
        return baselines.make(name, self.warmup, self.scored, capacity)


class Managed:
    """The shipped policy: the real manager with continuous adaptation, fed with decode routing. Moves and decisions take no
    time, and each decision may be followed by a move."""

    def __init__(self, shape: tuple[int, int], num_resident: int):
        """``shape``: (layers, experts per layer). ``num_resident`` experts per layer are resident. Each expert is one block."""
        requested = parse(
            {"num_resident": num_resident, "resident_selection": "first_n", "adapt": "continuous", "stream_tokens": "inf"}
        )
        assert requested is not None
        config = requested.resolved()
        self.manager = OffloadManager(
            config, EmulatedMemory(), CpuRoutingCounters, lambda decide: decide(), progress=lambda: False, clock=_Idle()
        )
        self._model = self.manager.begin_model(draft=False)
        self._shape = shape
        for layer_id in range(shape[0]):
            self._model.add_layer(self.manager.memory, LayerShard(layer_id, shape[1]))
        self.manager.place_model(self._model, InitialPlacement(config, None))
        self._tensors = [layer.allocate(PAGE_BYTES, torch.device("cpu"), "an expert's page") for layer in self._model.layers]
        self.manager.finish_model(self._model)
        self.resident = self._resident()

    def step(self, activated: np.ndarray) -> Served:
        """Serve a decode step. Tokens that share an expert activate it once, so the step is fed as one token that uses all its
        experts."""
        before = self.resident
        self.manager.begin_step(self._model, 1, 1, Phase.DECODE)
        assert self._model.counters is not None
        for layer, used in enumerate(activated):
            self._model.counters.count(layer, torch.from_numpy(np.flatnonzero(used)[None]), 0, IdFormat.PLAIN)
        self.manager.end_step(self._model)
        self.resident = self._resident()
        return Served(activated & self.resident, activated & ~self.resident, self.resident & ~before)

    def _resident(self) -> np.ndarray:
        """``bool[layers, experts]``"""
        return self._model.resident_extents().reshape(self._shape)


class _Idle:
    """A clock with unlimited time for moves, because the link model accounts for their cost."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1e6
        return self._now


def scope(
    trace: Trace, residency: float, batch: int, warmup_fraction: float, link_gbps: float | None, expert_bytes: int | None
) -> Scope:
    """The scope of ``replay`` with these arguments. None means unknown, to be assumed. Raises ``ValueError`` as ``replay``
    does."""
    workload, parts = Workload.of(trace, batch, warmup_fraction), trace.split(warmup_fraction)
    return Scope(
        requests=len(parts[1]),
        steps=len(workload.scored),
        warmup_requests=len(parts[0]),
        warmup_steps=len(workload.warmup),
        layers=workload.shape[0],
        num_experts=workload.shape[1],
        num_resident=int(workload.capacity(residency)[0]),
        residency=residency,
        batch=batch,
        link_gbps=LINK_GBPS if link_gbps is None else link_gbps,
        link_assumed=link_gbps is None,
        expert_bytes=EXPERT_BYTES if expert_bytes is None else expert_bytes,
        expert_bytes_assumed=expert_bytes is None,
    )


def replay(
    trace: Trace,
    policy: str,
    residency: float,
    batch: int = 1,
    warmup_fraction: float = 0.5,
    link_gbps: float = LINK_GBPS,
    expert_bytes: int = EXPERT_BYTES,
) -> Replay:
    """Serve ``trace`` with the share ``residency`` (0..1) of each layer's experts resident and ``batch`` concurrent requests,
    over a link of ``link_gbps`` 10^9 bytes per second. Raises ``ValueError`` for a trace that cannot be replayed."""
    workload = Workload.of(trace, batch, warmup_fraction)
    return serve(policy, workload.policy(policy, residency), workload, residency, link_gbps, expert_bytes)


def slot_splits(
    trace: Trace,
    residency: float,
    batch: int = 1,
    warmup_fraction: float = 0.5,
    link_gbps: float = LINK_GBPS,
    expert_bytes: int = EXPERT_BYTES,
) -> list[Split]:
    """``replay`` for each split of the VRAM of ``residency`` between slots and residents, which are the most activated experts
    of the warm-up."""
    workload = Workload.of(trace, batch, warmup_fraction)
    rows = int(workload.capacity(residency)[0])
    return [_split(workload, residency, share, rows, link_gbps, expert_bytes) for share in SHARES]


def _split(workload: Workload, residency: float, share: float, rows: int, link_gbps: float, expert_bytes: int) -> Split:
    slots, nothing = round(share * rows), np.zeros(workload.shape, dtype=bool)
    most = np.full(workload.shape[0], rows - slots)
    residents = top(workload.warmup.sum(axis=0, dtype=float), most, nothing, ~nothing)
    served = serve(SLOTS, SlotCache(workload.shape, slots, residents), workload, residency, link_gbps, expert_bytes)
    return Split(
        slot_share=share,
        residents=rows - slots,
        slots=slots,
        hit_rate=served.hit_rate,
        fills_per_step=served.moves_per_step,
        read_bytes_per_step=served.read_bytes_per_step,
        filled_bytes_per_step=served.moved_bytes_per_step,
        step_seconds=served.step_seconds,
    )


def serve(
    name: str,
    policy: ReplayPolicy,
    workload: Workload,
    residency: float,
    link_gbps: float = LINK_GBPS,
    expert_bytes: int = EXPERT_BYTES,
) -> Replay:
    """Run ``policy`` over ``workload``. The result names it ``name`` at ``residency``."""
    for activated in workload.warmup:
        policy.step(activated)
    steps = len(workload.scored)
    hits = np.zeros((steps, workload.shape[0]), dtype=np.int64)
    reads, moves = 0, 0
    for hit, activated in zip(hits, workload.scored, strict=True):
        served = policy.step(activated)
        hit[:] = served.hit.sum(axis=1)
        reads += int(np.count_nonzero(served.read))
        moves += int(np.count_nonzero(served.moved))
    activations = workload.scored.sum(axis=2)
    routing = np.ones(workload.shape[0], dtype=bool) if workload.routing is None else workload.routing
    per_layer = np.zeros(len(routing))
    per_layer[routing] = hits.sum(axis=0) / np.maximum(activations.sum(axis=0), 1)
    spans = np.array_split(np.stack([hits.sum(axis=1), activations.sum(axis=1)], axis=1), min(100, steps))
    return Replay(
        policy=name,
        residency=residency,
        batch=workload.batch,
        hit_rate=float(hits.sum() / max(activations.sum(), 1)),
        moves_per_step=moves / steps,
        read_bytes_per_step=reads * expert_bytes / steps,
        moved_bytes_per_step=moves * expert_bytes / steps,
        step_seconds=(reads + moves) * expert_bytes / steps / (link_gbps * 1e9),
        per_layer_hit_rate=per_layer.tolist(),
        hit_rate_over_time=[float(span[:, 0].sum() / max(span[:, 1].sum(), 1)) for span in spans],
    )

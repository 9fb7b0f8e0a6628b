"""MoE layers held as the plugin holds them, steps over them that stream, and kernels that copies run beside."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu.decode_step import elapsed_ms
from benchmarks.gpu.moe import MoeStep, Tiles, Weights, align
from benchmarks.gpu.shapes import MoeShape
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.staging import Part
from sglang_uvm_offload.streaming.streamer import Streamer

Parts = Sequence[Part]


class Layer:
    """One layer in managed memory, and in plain memory the weights that it was made with."""

    def __init__(self, memory: CudaMemory, index: int, plain: Weights, resident: np.ndarray | None = None, num_slots: int = 0):
        """``resident`` ``bool[E]``: those in VRAM to begin with, None: all. With ``num_slots`` rows behind the experts."""
        num_experts = plain.w13.shape[0]
        self.plain = plain
        first = np.ones(num_experts, dtype=bool) if resident is None else resident
        self.experts = ExpertLayer(
            memory, LayerShard(index, num_experts), lambda layout: layout.holding(first), num_slots=num_slots
        )
        self._names = ("w13", "w2", *(("scale13", "scale2") if num_slots and plain.fp8 else ()))
        self.module = torch.nn.Module()
        with AllocationMode(num_experts, self.experts.allocate):
            for name in self._names:
                weight = getattr(plain, name)
                made = torch.empty(weight.shape, dtype=weight.dtype, device="cuda")
                setattr(self.module, name, torch.nn.Parameter(made, requires_grad=False))
        self.experts.sync_tensors(self.module)
        self.write(plain)

    def write(self, weights: Weights) -> None:
        """An update of the weights."""
        for name in self._names:
            getattr(self.module, name).data.copy_(getattr(weights, name))

    def weights(self) -> Weights:
        """As a step finds them: in managed memory, or in a stream buffer."""
        return replace(self.plain, **{name: getattr(self.module, name).data for name in self._names})

    def keep(self, resident: np.ndarray) -> None:
        """Make these experts (``bool[E]``) resident, and nothing beyond their blocks."""
        after = np.concatenate([layout.holding(resident) for layout in self.experts.layouts])
        self.experts.demote(after)
        self.experts.promote(after)

    def keep_share(self, share: float) -> None:
        """A random share of the experts, always the same one. Experts smaller than a block stay together."""
        count = self.experts.num_experts
        together = max(1, BLOCK_BYTES // min(layout.expert_bytes for layout in self.experts.layouts))
        groups = -(-count // together)
        chosen = np.random.default_rng(1).permutation(groups) < round(share * groups)
        self.keep(np.repeat(chosen, together)[:count])


def tiles_for(shape: MoeShape, tokens: int) -> Tiles:
    """The block shapes that were fastest by the rows of an expert (``benchmarks/results/2026-11-22-nvidia-h200/layer.log``)."""
    rows = tokens * shape.top_k / shape.experts
    return Tiles(m=16) if rows <= 16 else Tiles(m=64) if rows <= 64 else Tiles(m=128, n=128, k=64, stages=4, warps=8)


def uniform_step(shape: MoeShape, tokens: int) -> MoeStep:
    """A MoE of so many tokens, each of which picks its experts at random."""
    tiles = tiles_for(shape, tokens)
    step = MoeStep(shape, tokens, shape.top_k, tiles, "cuda")
    ids = np.argsort(np.random.default_rng(tokens).random((tokens, shape.experts)), axis=1)[:, : shape.top_k]
    slots, experts = align(ids.astype(np.int32), shape.experts, tiles.m)
    step.route(torch.from_numpy(slots), torch.from_numpy(experts))
    step.x.normal_()
    return step


class Stack:
    """Steps, launched eagerly, of MoE layers that share buffers and routing. A layer may come up several times."""

    def __init__(self, step: MoeStep, layers: Sequence[Layer]):
        self.step, self.layers = step, layers
        self.held: list[float] = []
        """Seconds that streaming took of the launching thread, of each step that streamed."""

    def resident(self) -> None:
        for layer in self.layers:
            self.step.run(layer.plain)

    def in_place(self) -> None:
        for layer in self.layers:
            self.step.run(layer.weights())

    def streamed(self, streamer: Streamer, look: Callable[[int], None] = lambda row: None) -> None:
        """``look(row)`` is called after each layer. Raises ``AssertionError`` where a layer was read in place."""
        start = time.perf_counter()
        streamer.begin_step()
        held = time.perf_counter() - start
        for row, layer in enumerate(self.layers):
            start = time.perf_counter()
            reading = streamer.enter(row)
            held += time.perf_counter() - start
            if reading is None:
                raise AssertionError(f"layer {row} does not stream: {streamer.fault}")
            self.step.run(layer.weights())
            start = time.perf_counter()
            streamer.leave(reading)
            held += time.perf_counter() - start
            look(row)
        streamer.end_step()
        self.held.append(held)


class Beside:
    """Work of another stream, as long as it takes to run beside a whole copy."""

    def __init__(self, work: Callable[[], object]):
        self._work = work
        work()
        self._once = statistics.median(elapsed_ms(work) for _ in range(3))
        self._times = 1

    def last(self, ms: float) -> None:
        """Make it last so long from now on."""
        self._times = max(1, min(1000, math.ceil(ms / self._once))) if self._once > 0 else 1

    def run(self) -> None:
        for _ in range(self._times):
            self._work()


def copy_ms(
    copy: Callable[[], object], staging: CudaStaging, side: torch.cuda.Stream, beside: Beside | None = None
) -> tuple[float, float]:
    """Milliseconds of a ``copy`` of ``staging`` to its buffer 0 that begins while ``beside`` runs, and of ``beside``."""
    began, ended, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    torch.cuda.synchronize()
    began.record()
    if beside:
        beside.run()
    ended.record()
    with torch.cuda.stream(side):
        start.record()
        staging.begin_step()
        copy()
        staging.acquire(0)
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end), began.elapsed_time(ended)

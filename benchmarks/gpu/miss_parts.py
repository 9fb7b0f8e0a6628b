"""What a miss costs a decode step: one expert out of host RAM, read in place by the MoE kernel, or brought in by a copy."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.decode_step import Managed, capture, elapsed_ms
from benchmarks.gpu.moe import MoeStep, Tiles, Weights, align, random_weights
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.shapes import DEEPSEEK_V3, GLM_45_AIR, MoeShape
from benchmarks.gpu.stream_layers import Parts
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.memory.layout import whole_blocks
from sglang_uvm_offload.memory.protocol import ManagedRange
from sglang_uvm_offload.memory.staging import Part

SWEEP = (
    Tiles(n=64, k=128, stages=3, warps=4),
    Tiles(n=128, k=64, stages=4, warps=8),
    Tiles(n=32, k=128, stages=4, warps=4),
    Tiles(n=64, k=64, stages=6, warps=4),
    Tiles(n=16, k=128, stages=5, warps=4),
)
IN_TURN = 8
"""Experts that are used one after the other, so that the L2 cache does not hold the weights."""


class OneExpert:
    """One of ``IN_TURN`` experts of a layer: managed, and a scratch in plain memory that one is copied into."""

    def __init__(self, full: MoeShape):
        self.shape = MoeShape(full.name, 1, IN_TURN, 1, full.hidden, full.intermediate)
        plain = random_weights(self.shape, False, "cuda", 1)
        self.managed = Managed(CudaMemory(), plain, full.name)
        self.scratch = Weights(plain.w13[:1].clone(), plain.w2[:1].clone(), plain.scale13, plain.scale2)
        self.nbytes = self.shape.expert_bytes(False)

    def offload(self) -> None:
        self.managed.keep(np.zeros(IN_TURN, dtype=bool))


class Pinned:
    """A layer's experts in pinned host memory, whose pages are small, as tensors of the GPU."""

    def __init__(self, plain: Weights):
        self._held: list[torch.Tensor] = []
        self.weights = Weights(self._view(plain.w13), self._view(plain.w2), plain.scale13, plain.scale2)

    def _view(self, weight: torch.Tensor) -> torch.Tensor:
        host = torch.empty(weight.numel() * weight.element_size(), dtype=torch.uint8, pin_memory=True)
        self._held.append(host)
        described = {"shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3}
        flat = torch.as_tensor(type("Described", (), {"__cuda_array_interface__": described})(), device="cuda")
        flat.copy_(weight.view(torch.uint8).flatten())
        return flat.view(weight.dtype).view(weight.shape)


def expert_parts(weights: Weights, expert: int) -> Parts:
    """For a copy of one expert."""
    w13, w2 = (
        ManagedRange(it[expert].data_ptr(), it[expert].numel() * it.element_size(), name)
        for name, it in (("w13", weights.w13), ("w2", weights.w2))
    )
    return [Part(w13, w13.nbytes, 0), Part(w2, w2.nbytes, whole_blocks(w13.nbytes))]


def mean_stretch_kib(weight: torch.Tensor) -> float | None:
    """The mean contiguous stretch of the host pages of the first 64 MiB; None where the kernel does not tell it."""
    nbytes, address = min(weight.numel() * weight.element_size(), 64 << 20) // 4096 * 4096, weight.data_ptr()
    np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))[::4096].sum()  # into this process's page table
    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(address // 4096 * 8)
            frames = np.frombuffer(pagemap.read(nbytes // 4096 * 8), dtype=np.uint64) & np.uint64((1 << 55) - 1)
    except OSError:
        return None
    return nbytes / 1024 / (1 + int((np.diff(frames.astype(np.int64)) != 1).sum())) if frames.all() else None


def pages(rows: Rows) -> None:
    """One token on one of a few offloaded experts: GB/s of the MoE kernel in a graph by block shape, of the project's copy
    kernel, and of copies told device to device; by host memory."""
    for full in (GLM_45_AIR, DEEPSEEK_V3):
        one = OneExpert(full.toy if rows.small else full)
        pinned = Pinned(one.managed.weights)
        one.offload()
        for memory, weights in (("managed", one.managed.weights), ("pinned", pinned.weights)):
            stretch = mean_stretch_kib(weights.w13)
            rows.put("host_stretch", "KiB", [] if stretch is None else [stretch], shape=full.name, memory=memory)
            for tiles in SWEEP[: rows.pick(len(SWEEP), 1)]:
                if rows.late():
                    return
                put_rates(rows, one, full.name, memory, f"MoE kernel, {tiles.name}", moe_times(rows, one, weights, tiles))
            put_rates(rows, one, full.name, memory, "copy kernel", copy_times(rows, one, weights))
            put_rates(rows, one, full.name, memory, "copy engine, device to device", engine_times(rows, one, weights))
        del one, pinned, weights
        gc.collect()
        torch.cuda.empty_cache()


def put_rates(rows: Rows, one: OneExpert, shape: str, memory: str, way: str, times: list[float]) -> None:
    rows.put("miss", "GB/s", [one.nbytes / ms / 1e6 for ms in times], shape=shape, memory=memory, way=way)


def in_turn(rows: Rows) -> list[int]:
    """Experts, so that no cache holds the one that is read; the first round warms up."""
    return [i % IN_TURN for i in range((rows.pick(4, 1) + 1) * IN_TURN)]


def moe_times(rows: Rows, one: OneExpert, weights: Weights, tiles: Tiles) -> list[float]:
    step = MoeStep(one.shape, 1, 1, replace(tiles, m=16), "cuda")
    step.x.normal_()
    graph = capture(lambda: step.run(weights))

    def once(expert: int) -> float:
        slots, owner = align(np.full((1, 1), expert, dtype=np.int32), IN_TURN, 16)
        step.route(torch.from_numpy(slots), torch.from_numpy(owner))
        return elapsed_ms(graph.replay)

    return [once(expert) for expert in in_turn(rows)][IN_TURN:]


def copy_times(rows: Rows, one: OneExpert, weights: Weights) -> list[float]:
    parts = [expert_parts(weights, expert) for expert in range(IN_TURN)]
    staging = CudaStaging(0, sum(whole_blocks(part.nbytes) for part in parts[0]), 1)

    def once(expert: int) -> None:
        staging.begin_step()
        staging.copy(0, parts[expert])
        staging.acquire(0)

    return [elapsed_ms(partial(once, expert)) for expert in in_turn(rows)][IN_TURN:]


def engine_times(rows: Rows, one: OneExpert, weights: Weights) -> list[float]:
    def once(expert: int) -> None:
        one.scratch.w13[0].copy_(weights.w13[expert], non_blocking=True)
        one.scratch.w2[0].copy_(weights.w2[expert], non_blocking=True)

    return [elapsed_ms(partial(once, expert)) for expert in in_turn(rows)][IN_TURN:]


PARTS = {pages.__name__: pages}

if __name__ == "__main__":
    run_part(PARTS)

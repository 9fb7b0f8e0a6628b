"""Parts that measure the link: how fast this machine's GPU reads and copies host memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import torch

from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.timing import elapsed_ms, gb_per_s
from sglang_uvm_offload.cuda.link import CudaLinkTimer
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, batches
from sglang_uvm_offload.memory.link import ALONE_SECONDS, TOGETHER_SECONDS, Offloaded
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Span

MIB, GIB = 1 << 20, 1 << 30
EXPERT_BYTES = 3 << 19
REPEATS = 5
READERS = (0, 1, 2, 4, 8)
"""Reader threads; 0: a prefetch alone."""


def link(rows: Rows) -> None:
    """Measures the link as a server does at start, and copies from pinned memory for comparison."""
    nbytes = rows.pick(8 * GIB, 64 * MIB)
    with offloaded(nbytes) as timer:
        found: list[dict[str, float]] = []
        for seconds_each, who in ((ALONE_SECONDS, "one rank alone"), (TOGETHER_SECONDS, "all at once")):
            took = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                found.append(asdict(timer.rates(seconds_each, lambda: None)))
                took.append(time.perf_counter() - began)
            rows.put("link_seconds", "s", took, of=who)
        for name in found[0]:
            rows.put("link", "GB/s", [rates[name] for rates in found], of=name, managed_gib=nbytes / GIB)
    rows.put("link_pinned", "GB/s", from_pinned(rows.pick(256 * MIB, 4 * MIB)))


@contextmanager
def offloaded(nbytes: int) -> Iterator[CudaLinkTimer]:
    """Yields a timer over ``nbytes`` of experts in host RAM."""
    memory = CudaMemory()
    managed = memory.allocate(nbytes, "offloaded experts")
    held = memory.tensor(managed)
    memory.place(managed, [Span(0, nbytes)], Location.HOST)
    blocks = managed.address + np.arange(0, nbytes, BLOCK_BYTES)
    yield CudaLinkTimer(memory.device, [Offloaded(blocks, EXPERT_BYTES)])
    del held


def from_pinned(nbytes: int) -> list[float]:
    """Returns the copy engine's rates from pinned memory, in GB/s."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = [elapsed_ms(lambda: target.copy_(source, non_blocking=True)) for _ in range(REPEATS + 1)]
    return [gb_per_s(nbytes, ms) for ms in times[1:]]


def reach(rows: Rows) -> None:
    """Compares reads of scattered and of neighbouring experts, in a small and a large range."""
    for nbytes in (rows.pick(GIB, 8 * MIB), rows.pick(24 * GIB, 32 * MIB)):
        if rows.late():
            return
        with offloaded(nbytes) as timer:
            found = [asdict(timer.rates(TOGETHER_SECONDS, lambda: None)) for _ in range(REPEATS)]
        for name in ("sequential", "scattered"):
            rows.put("reach", "GB/s", [each[name] for each in found], of=name, gib=nbytes / GIB)


def populate(rows: Rows) -> None:
    """Populates host pages in pieces, with the function that loading uses; again when all pages exist; then reads them on the
    GPU."""
    nbytes = rows.pick(2 * GIB, 64 * MIB)
    memory = CudaMemory()
    for readers in READERS:
        first: list[float] = []
        again: list[float] = []
        read: list[float] = []
        for _ in range(REPEATS):
            if rows.late():
                return
            managed = memory.allocate(nbytes, "host pages")
            for took, number in ((first, readers), (again, 0)):
                took.append(nbytes / populated_in(memory, managed, number) / 1e9)
            blocks = managed.address + np.arange(0, nbytes, BLOCK_BYTES)
            timer = CudaLinkTimer(memory.device, [Offloaded(blocks, EXPERT_BYTES)])
            read.append(timer.rates(ALONE_SECONDS, lambda: None).sequential)
            if memory.tensor(managed).cpu().any():
                raise AssertionError(f"pages that {readers} threads populated are not zeroed")
        for of, values in (("new pages", first), ("pages that are there", again), ("reads by the GPU", read)):
            rows.put("populate", "GB/s", values, of=of, readers=readers)


def populated_in(memory: CudaMemory, managed: ManagedRange, readers: int) -> float:
    """Returns the seconds that populating took."""
    ops, nbytes = device_ops(memory.device), managed.nbytes
    ops.prefer_host(memory.device, managed.address, nbytes, torch.cuda.current_stream().cuda_stream)
    began = time.perf_counter()
    for piece in batches([Span(0, nbytes)]):
        ops.populate(memory.device, managed.address, piece, readers)
    return time.perf_counter() - began


def writes(rows: Rows) -> None:
    """Writes weights from plain memory as SGLang's loader does, with ``copy_``, and directly from the CPU."""
    nbytes = rows.pick(512 * MIB, 8 * MIB)
    memory = CudaMemory()
    source = torch.randint(256, (nbytes,), dtype=torch.uint8)
    for where in Location:
        managed = memory.allocate(nbytes, "weights")
        memory.place(managed, [Span(0, nbytes)], where)
        mine = memory.tensor(managed)
        rows.put("writes", "GB/s", written(source, mine), of=f"copy_ into {where.value}")
        if where is Location.HOST:
            mine.zero_()
            torch.cuda.synchronize()
            by_cpu = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(managed.address), dtype=torch.uint8)
            rows.put("writes", "GB/s", written(source, by_cpu), of=f"the CPU into {where.value}")
        if not torch.equal(mine.cpu(), source):
            raise AssertionError(f"{where.value} holds other bytes than were written")


def written(source: torch.Tensor, target: torch.Tensor) -> list[float]:
    """Returns the rate of each write, in GB/s."""
    rates = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        rates.append(source.nbytes / (time.perf_counter() - began) / 1e9)
    return rates


PARTS = {each.__name__: each for each in (link, reach, populate, writes)}

if __name__ == "__main__":
    run_part(PARTS)

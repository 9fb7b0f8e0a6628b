"""Parts about host memory: how fast this machine's GPU reads and copies it, and how fast its pages come to be."""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.timing import elapsed_ms, gb_per_s
from sglang_uvm_offload.cuda.link import CudaLinkTimer
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.link import ALONE_SECONDS, TOGETHER_SECONDS, Offloaded
from sglang_uvm_offload.memory.protocol import Location, Span

MIB, GIB = 1 << 20, 1 << 30
EXPERT_BYTES = 3 << 19
REPEATS = 5
CHUNK_BYTES = 16 * MIB
"""Of a file, in one call."""

# ---- the link ----


def link(rows: Rows) -> None:
    """As a server measures it at its start, beside copies from pinned memory."""
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
    """Times reads of so many bytes of experts in host RAM."""
    memory = CudaMemory()
    managed = memory.allocate(nbytes, "offloaded experts")
    held = memory.tensor(managed)
    memory.place(managed, [Span(0, nbytes)], Location.HOST)
    blocks = managed.address + np.arange(0, nbytes, BLOCK_BYTES)
    yield CudaLinkTimer(memory.device, [Offloaded(blocks, EXPERT_BYTES)])
    del held


def from_pinned(nbytes: int) -> list[float]:
    """The copy engine's rate from pinned memory, GB/s."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    times = [elapsed_ms(lambda: target.copy_(source, non_blocking=True)) for _ in range(REPEATS + 1)]
    return [gb_per_s(nbytes, ms) for ms in times[1:]]


def reach(rows: Rows) -> None:
    """Experts that lie far apart in more and more memory beside neighbours, also while all cores copy memory."""
    for nbytes in (rows.pick(GIB, 8 * MIB), rows.pick(24 * GIB, 32 * MIB)):
        with offloaded(nbytes) as timer:
            for cpu, load in (
                ("idle", lambda: None),
                ("copies on all cores", partial(copy_for_ever, rows.pick(64 * MIB, MIB))),
            ):
                if rows.late():
                    return
                with on_all_cores(load):
                    found = [asdict(timer.rates(TOGETHER_SECONDS, lambda: None)) for _ in range(REPEATS)]
                for name in ("sequential", "scattered"):
                    rows.put("reach", "GB/s", [each[name] for each in found], of=name, gib=nbytes / GIB, cpu=cpu)


def copy_for_ever(nbytes: int) -> Callable[[], None]:
    source, target = np.ones(nbytes, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
    return lambda: np.copyto(target, source)


@contextmanager
def on_all_cores(load: Callable[[], Callable[[], None] | None]) -> Iterator[None]:
    """Each runs what ``load`` returns, again and again, until the end of the block."""
    over = threading.Event()

    def run() -> None:
        work = load()
        while work and not over.is_set():
            work()

    threads = [threading.Thread(target=run) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


# ---- pages ----


def populate(rows: Rows) -> None:
    """Host pages of experts by the plugin's prefetch, and by threads of the CPU that write, or read a cached file into them.
    Then the GPU reads them in place."""
    nbytes = rows.pick(2 * GIB, 32 * MIB)
    wanted = np.random.default_rng(1).integers(0, 256, nbytes, "uint8")
    memory, shared = CudaMemory(), Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=shared if shared.is_dir() else None) as file:
        file.write(wanted.data)
        file.flush()

        def write(target: np.ndarray, at: int) -> None:
            np.copyto(target[at : at + CHUNK_BYTES], wanted[at : at + CHUNK_BYTES])

        def read(target: np.ndarray, at: int) -> None:
            part = target[at : at + CHUNK_BYTES].data
            while part:
                taken = os.preadv(file.fileno(), [part], at)
                at, part = at + taken, part[taken:]

        for way, work in (("prefetch", None), ("CPU writes", write), ("reads of a cached file", read)):
            for threads in (1, 2, 4, 8) if work else (1,):
                if rows.late():
                    return
                populated, again = [], []
                for _ in range(rows.pick(REPEATS, 2)):
                    managed = memory.allocate(nbytes, "experts")
                    held, target = memory.tensor(managed), on_host(managed.address, nbytes)
                    began = time.perf_counter()
                    if work:
                        with ThreadPoolExecutor(threads) as pool:
                            list(pool.map(partial(work, target), range(0, nbytes, CHUNK_BYTES)))
                    else:
                        memory.place(managed, [Span(0, nbytes)], Location.HOST)
                    populated.append(nbytes / (time.perf_counter() - began) / 1e9)
                    memory.place(managed, [Span(0, nbytes)], Location.HOST)
                    again.append(gb_per_s(nbytes, elapsed_ms(partial(torch.sum, held.view(torch.int64)))))
                    if work and not np.array_equal(target, wanted):
                        raise AssertionError(f"{way}, {threads} threads: other bytes than were written")
                    del target, held
                rows.put("populate", "GB/s", populated, way=way, threads=threads)
                rows.put("populated_read", "GB/s", again, way=way, threads=threads)


def on_host(address: int, nbytes: int) -> np.ndarray:
    """Managed memory as the CPU has it."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


PARTS = {each.__name__: each for each in (link, reach, populate)}

if __name__ == "__main__":
    run_part(PARTS)

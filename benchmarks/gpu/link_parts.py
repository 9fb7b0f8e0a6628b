"""The part that times the link as a server does at its start, beside copies from pinned memory."""

from __future__ import annotations

import time
from dataclasses import asdict

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.rows import Rows, run_part
from sglang_uvm_offload.cuda.link import CudaLinkTimer
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.link import ALONE_SECONDS, TOGETHER_SECONDS, Offloaded
from sglang_uvm_offload.memory.protocol import Location, Span

EXPERT_BYTES = 3 << 19
REPEATS = 5


def start_link(rows: Rows) -> None:
    memory, nbytes = CudaMemory(), rows.pick(8 << 30, 64 << 20)
    managed = memory.allocate(nbytes, "offloaded experts")
    held = memory.tensor(managed)
    memory.place(managed, [Span(0, nbytes)], Location.HOST)
    blocks = managed.address + np.arange(0, nbytes, BLOCK_BYTES)
    timer = CudaLinkTimer(memory.device, [Offloaded(blocks, EXPERT_BYTES)])
    found: list[dict[str, float]] = []
    seconds: dict[float, list[float]] = {}
    for seconds_each in (ALONE_SECONDS, TOGETHER_SECONDS):
        for _ in range(REPEATS):
            began = time.perf_counter()
            found.append(asdict(timer.rates(seconds_each, lambda: None)))
            seconds.setdefault(seconds_each, []).append(time.perf_counter() - began)
    for name in found[0]:
        rows.put("start_link", "GB/s", [rates[name] for rates in found], of=name, managed_gib=nbytes / 2**30)
    rows.put("start_link_seconds", "s", seconds[ALONE_SECONDS], of="one rank alone")
    rows.put("start_link_seconds", "s", seconds[TOGETHER_SECONDS], of="all at once")
    del held
    rows.put("start_link_pinned", "GB/s", _pinned(rows.pick(256 << 20, 4 << 20)))


def _pinned(nbytes: int) -> list[float]:
    """The copy engine's rate from pinned memory, 1e9 bytes a second."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for repeat in range(REPEATS + 1):
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        if repeat:
            found.append(nbytes / (began.elapsed_time(ended) * 1e6))
    return found


PARTS = {"start_link": start_link}

if __name__ == "__main__":
    if not computes():
        print("no kernel computes here: no rate is a measurement")
    run_part(PARTS)

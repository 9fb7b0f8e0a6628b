"""Telling where pages are by how long the GPU takes to read them: the driver has no query for it.

A read that VRAM answers takes less than half as long as one over the link (measured on an H200: at most 1,275 cycles against
at least 2,151, ``read_latency`` in benchmarks/results/2026-11-22-nvidia-h200/probe.json). A page that was evicted and prefers
the GPU faults when it is read, and then is in VRAM again: only its first read shows that, by taking far longer than one that
VRAM answers (an H100 under pressure: 191,528 cycles or more, ``look`` in
benchmarks/results/2026-11-26-nvidia-h100/eviction.json).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cuda.ops import CudaOps
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

FAULT_CYCLES = 100_000
"""A first read of fewer cycles was no fault. It may miss the TLB, which takes 4,712 at most while nothing else runs (as above),
and longer beside steps that read host RAM, whose pages miss it too: on an H200 ten times a read that VRAM answers took all
residents for evicted (``servers`` in benchmarks/results/2026-11-26-nvidia-h200, with 131 GiB of VRAM free)."""
FAULT_OVER_NEAR = 10
"""Nor was one of fewer times the cycles of a read that VRAM answers, however much the GPU does besides."""
BUSY_CYCLES = 10_000
"""From here on a read over the link is taken to wait for others (assumed: idle ones took 4,466 at most, ``read_latency`` in
benchmarks/results/2026-11-26-nvidia-h100/probe.json). Beside others, first reads of VRAM may take
as long as a fault: servers on an H200 whose steps filled the link took most of their residents for evicted, with 131 GiB of
VRAM free (``evicted_bytes`` in benchmarks/results/2026-11-27-nvidia-h200/serving_slots.json)."""
REFERENCE_READS = 32
PLAIN_BYTES = 4 * BLOCK_BYTES
LAUNCH_BLOCKS = 4096
READ_BYTES = 4 << 10
"""The kernel reads some lines of as many bytes."""


class ReadTimes:
    """Times reads of blocks, next to reads of plain VRAM and of a block that stays in host RAM. Clocks, links and what else the
    GPU does differ; within one launch they are the same for all."""

    def __init__(self, ops: CudaOps, device: int, in_host_ram: int):
        """``in_host_ram``: the address of a block that the GPU reads in place."""
        self._ops = ops
        self._device = device
        self._plain = torch.empty(PLAIN_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
        self._in_host_ram = in_host_ram
        self._launches = 0
        most = LAUNCH_BLOCKS + 2 * REFERENCE_READS
        self._addresses = torch.empty(most, dtype=torch.int64, pin_memory=True)
        self._times = torch.empty(most, 2, dtype=torch.int32, pin_memory=True)
        self._random = np.random.default_rng()

    def in_vram(self, blocks: Sequence[int]) -> np.ndarray | None:
        """``bool[len(blocks)]`` for the addresses of blocks, None where that cannot be told (``told_apart``). Raises
        ``CudaFailure``."""
        found = []
        for begin in range(0, max(1, len(blocks)), LAUNCH_BLOCKS):
            told = self._launch(np.array(blocks[begin : begin + LAUNCH_BLOCKS], dtype=np.int64))
            if told is None:
                return None
            found.append(told)
        return np.concatenate(found)

    def _launch(self, blocks: np.ndarray) -> np.ndarray | None:
        # Where no cache holds it from the last time: plain VRAM in turn, and anywhere in the blocks.
        turn = np.arange(REFERENCE_READS) + self._launches * REFERENCE_READS
        self._launches += 1
        plain = self._plain.data_ptr() + turn * READ_BYTES % PLAIN_BYTES
        managed = np.concatenate([np.full(REFERENCE_READS, self._in_host_ram), blocks])
        managed += self._random.integers(0, BLOCK_BYTES // READ_BYTES, len(managed)) * READ_BYTES
        reads = np.concatenate([plain, managed])
        addresses, times = self._addresses[: len(reads)], self._times[: len(reads)]
        addresses.copy_(torch.from_numpy(reads))
        self._ops.time_reads(self._device, addresses, times)
        first, later = times.numpy().view(np.uint32).astype(np.int64).T
        near, far = np.split(later[: 2 * REFERENCE_READS], 2)
        return told_apart(first[2 * REFERENCE_READS :], later[2 * REFERENCE_READS :], near, far)


def told_apart(first: np.ndarray, later: np.ndarray, near: np.ndarray, far: np.ndarray) -> np.ndarray | None:
    """``bool[n]``: which blocks were in VRAM, by the cycles of their ``first`` and ``later`` reads, and of reads that VRAM
    (``near``) and host RAM (``far``) answered. None where these do not differ enough (a coherent link), or the link is busy."""
    vram, link = float(np.median(near)), float(np.median(far))
    if vram > link / 2 or link > BUSY_CYCLES:
        return None
    return (later <= link / 2) & (first < max(FAULT_CYCLES, FAULT_OVER_NEAR * vram))

"""Telling where pages are by how long the GPU takes to read them: the driver has no query for it.

A read that VRAM answers takes less than half as long as one over the link (measured on an H200: at most 1,275 cycles against at
least 2,151, ``read_latency`` in benchmarks/results/2026-11-22-nvidia-h200/probe.json). A page that was evicted and prefers the
GPU faults when it is read, and then is in VRAM again: only its first read shows that, by taking several times as long as one
over the link (never run).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cuda.ops import CudaOps
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

FAULT_OVER_FAR = 5
"""A first read that takes this many times as long as one over the link was a fault: one that only misses the TLB takes about
as long as one over the link."""
REFERENCE_READS = 32
LAUNCH_BLOCKS = 4096
READ_BYTES = 4 << 10
"""The kernel reads some lines of as many bytes."""


class ReadTimes:
    """Times reads of blocks, beside reads of one in plain VRAM and of one that stays in host RAM. Clocks, links and what else
    the GPU does differ; within one launch they are the same for all."""

    def __init__(self, ops: CudaOps, device: int, in_host_ram: int):
        """``in_host_ram``: the address of a block that the GPU reads in place."""
        self._ops = ops
        self._device = device
        self._plain = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=f"cuda:{device}")
        most = LAUNCH_BLOCKS + 2 * REFERENCE_READS
        self._addresses = torch.empty(most, dtype=torch.int64, pin_memory=True)
        self._times = torch.empty(most, 2, dtype=torch.int32, pin_memory=True)
        self._references = np.repeat([self._plain.data_ptr(), in_host_ram], REFERENCE_READS)
        self._random = np.random.default_rng()

    def in_vram(self, blocks: Sequence[int]) -> np.ndarray | None:
        """``bool[len(blocks)]`` for the addresses of blocks, None where the two blocks to compare with look alike. Raises
        ``CudaFailure``."""
        found = []
        for begin in range(0, max(1, len(blocks)), LAUNCH_BLOCKS):
            told = self._launch(np.array(blocks[begin : begin + LAUNCH_BLOCKS], dtype=np.int64))
            if told is None:
                return None
            found.append(told)
        return np.concatenate(found)

    def _launch(self, blocks: np.ndarray) -> np.ndarray | None:
        reads = np.concatenate([self._references, blocks])
        # Somewhere in each block, so that no cache holds it from the last time.
        reads += self._random.integers(0, BLOCK_BYTES // READ_BYTES, len(reads)) * READ_BYTES
        addresses, times = self._addresses[: len(reads)], self._times[: len(reads)]
        addresses.copy_(torch.from_numpy(reads))
        self._ops.time_reads(self._device, addresses, times)
        first, later = times.numpy().astype(np.int64).T
        near, far = np.split(later[: len(self._references)], 2)
        return told_apart(first[len(self._references) :], later[len(self._references) :], near, far)


def told_apart(first: np.ndarray, later: np.ndarray, near: np.ndarray, far: np.ndarray) -> np.ndarray | None:
    """``bool[n]``: which blocks were in VRAM, by the cycles of their ``first`` and ``later`` reads, and of reads that VRAM
    (``near``) and host RAM (``far``) answered. None where these do not differ enough (a coherent link)."""
    link = float(np.median(far))
    if np.median(near) > link / 2:
        return None
    return (later <= link / 2) & (first < FAULT_OVER_FAR * link)

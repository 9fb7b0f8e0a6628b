"""Infers from read latency whether pages are in VRAM, because the driver has no query for it.

A read from VRAM takes less than half as long as one over the link (measured on an H200: at most 1,275 cycles against at least
2,151, ``read_latency`` in benchmarks/results/2026-11-22-nvidia-h200/probe.json). Reading an evicted page that prefers the GPU
faults and brings the page back to VRAM. Only the first read shows this: it takes far longer than one from VRAM (an H100 under
pressure: 191,528 cycles or more, ``look`` in benchmarks/results/2026-11-26-nvidia-h100/eviction.json).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cuda.ops import CudaOps
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

FAULT_CYCLES = 100_000
"""A first read with fewer cycles did not fault. It may miss the TLB, which takes at most 4,712 cycles on an idle GPU (source as
above). It takes longer beside steps that read host RAM, whose pages also miss the TLB: on an H200, a threshold of ten VRAM
reads classified all residents as evicted (``servers`` in benchmarks/results/2026-11-26-nvidia-h200, with 131 GiB of VRAM
free)."""
FAULT_OVER_NEAR = 10
"""A first read with fewer than this multiple of a VRAM read's cycles did not fault either, however busy the GPU is."""
BUSY_CYCLES = 10_000
"""From this latency on, the link counts as busy (assumed: reads on an idle link took at most 4,466 cycles, ``read_latency`` in
benchmarks/results/2026-11-26-nvidia-h100/probe.json). On a busy GPU, first reads of VRAM may take as long as a fault: servers
on an H200 whose steps saturated the link classified most of their residents as evicted, with 131 GiB of VRAM free
(``evicted_bytes`` in benchmarks/results/2026-11-27-nvidia-h200/serving_slots.json)."""
REFERENCE_READS = 32
PLAIN_BYTES = 4 * BLOCK_BYTES
LAUNCH_BLOCKS = 4096
READ_BYTES = 4 << 10
"""The kernel reads some lines within this many bytes."""


class ReadTimes:
    """Times reads of blocks together with reference reads of plain VRAM and of a block pinned to host RAM. Clocks, links and
    GPU load vary, but are the same for all reads of one launch."""

    def __init__(self, ops: CudaOps, device: int, in_host_ram: int):
        """``in_host_ram`` is the address of a block that stays in host RAM."""
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
        """``bool[len(blocks)]``: whether the block at each address is in VRAM; None if undecidable (``told_apart``). Raises
        ``CudaFailure``."""
        found = []
        for begin in range(0, max(1, len(blocks)), LAUNCH_BLOCKS):
            told = self._launch(np.array(blocks[begin : begin + LAUNCH_BLOCKS], dtype=np.int64))
            if told is None:
                return None
            found.append(told)
        return np.concatenate(found)

    def _launch(self, blocks: np.ndarray) -> np.ndarray | None:
        # Avoid addresses cached by the last launch: rotate through plain VRAM, and read random places in the blocks.
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
    """``bool[n]``: which blocks were in VRAM, from the cycles of their ``first`` and ``later`` reads and of reference reads
    from VRAM (``near``) and host RAM (``far``). None if the references differ too little (a coherent link) or the link is
    busy."""
    vram, link = float(np.median(near)), float(np.median(far))
    if vram > link / 2 or link > BUSY_CYCLES:
        return None
    return (later <= link / 2) & (first < max(FAULT_CYCLES, FAULT_OVER_NEAR * vram))

"""Measures how fast a GPU reads and copies its offloaded experts, at their actual addresses."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import call_driver
from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.link import LinkRates, Offloaded
from sglang_uvm_offload.memory.staging import LINK_BLOCKS, VRAM_BLOCKS

LEAST_BYTES, MOST_BYTES = 16 << 20, 256 << 20
"""The size of a timed call."""
CALL_SECONDS = 0.005
"""The target duration of a call on a link too slow for ``MOST_BYTES``."""
COPY_BYTES = 64 << 20
"""The VRAM that copies write to."""
NONE_IN_VRAM = np.zeros(0, dtype=bool)
RESOLUTION_MS = 5e-4
"""The resolution of events (``cudaEventElapsedTime``)."""


class _Call(NamedTuple):
    """A call to time, and the bytes that it moves over the link."""

    nbytes: int
    make: Callable[[], object]


class CudaLinkTimer:
    """``LinkTimer`` of the GPU ``device``, on torch's current stream. ``offloaded`` must have at least one block. The
    constructor raises ``RuntimeError``, for example without enough VRAM."""

    def __init__(self, device: int, offloaded: Sequence[Offloaded]):
        self._device, self._ops = device, device_ops(device)
        where = torch.device("cuda", device)
        self._blocks = np.concatenate([one.blocks for one in offloaded])
        smallest = min(one.expert_bytes for one in offloaded if one.blocks.size)
        self._piece = min(max(smallest, PAGE_BYTES), BLOCK_BYTES) // 16 * 16
        self._run = max((_longest_run(one.blocks) for one in offloaded if one.blocks.size), key=len)
        self._target = torch.empty(min(COPY_BYTES, self._run.size * BLOCK_BYTES), dtype=torch.uint8, device=where)
        self._words = torch.zeros(2, dtype=torch.int32).to(where)
        self._random = np.random.default_rng(0)
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def rates(self, seconds: float, wait: Callable[[], object]) -> LinkRates:
        ways = (self._read_in_sequence, self._read_scattered, self._copy_by_kernel, self._copy_by_engine)
        return LinkRates(*(self._rate(way, seconds, wait) for way in ways))

    def close(self) -> None:
        del self._target
        torch.cuda.empty_cache()  # so that later queries see this VRAM as free

    def _rate(self, prepared: Callable[[int], _Call], seconds: float, wait: Callable[[], object]) -> float:
        """The median rate in 1e9 bytes/s."""
        warm = max(self._once(prepared(LEAST_BYTES)) for _ in range(2))
        nbytes = int(min(MOST_BYTES, max(LEAST_BYTES, warm * 1e9 * CALL_SECONDS)))
        wait()
        until = time.perf_counter() + seconds
        found: list[float] = []
        while not found or time.perf_counter() < until:
            found.append(self._once(prepared(nbytes)))
        return statistics.median(found)

    def _once(self, call: _Call) -> float:
        self._began.record()
        call.make()
        self._ended.record()
        self._ended.synchronize()
        return call.nbytes / (max(self._began.elapsed_time(self._ended), RESOLUTION_MS) * 1e6)

    def _read_in_sequence(self, nbytes: int) -> _Call:
        return self._reading(self._run[: nbytes // BLOCK_BYTES], BLOCK_BYTES)

    def _read_scattered(self, nbytes: int) -> _Call:
        blocks = self._random.permutation(self._blocks)[: nbytes // self._piece]
        places = self._random.integers(0, BLOCK_BYTES // self._piece, blocks.size)
        return self._reading(blocks + places * self._piece, self._piece)

    def _reading(self, addresses: np.ndarray, nbytes: int) -> _Call:
        pieces = torch.from_numpy(addresses).to(self._words.device)
        return _Call(len(pieces) * nbytes, lambda: self._ops.read_pieces(pieces, nbytes, self._words))

    def _copy_by_kernel(self, nbytes: int) -> _Call:
        stream, target = self._stream(), self._target.data_ptr()

        def copy(source: int, size: int) -> None:
            part = (source, target, size)
            self._ops.copy_layer(self._device, [part], NONE_IN_VRAM, (LINK_BLOCKS, VRAM_BLOCKS), self._words, stream, stream)

        return self._copying(nbytes, copy)

    def _copy_by_engine(self, nbytes: int) -> _Call:
        """Copies device to device, because with another direction the driver treats managed memory as pageable (``copies`` in
        benchmarks/results/2026-11-26-nvidia-h100/stream.json)."""
        stream, target = self._stream(), self._target.data_ptr()
        return self._copying(nbytes, lambda source, size: call_driver(driver.cuMemcpyDtoDAsync, target, source, size, stream))

    def _copying(self, nbytes: int, copy: Callable[[int, int], object]) -> _Call:
        first, step = int(self._run[0]), self._target.numel()
        end = max(step, min(nbytes, self._run.size * BLOCK_BYTES) // step * step)
        return _Call(end, lambda: [copy(first + at, step) for at in range(0, end, step)])

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream


def _longest_run(blocks: np.ndarray) -> np.ndarray:
    """The longest run of neighbours in the sorted ``blocks``, cut to ``MOST_BYTES``."""
    runs = np.split(blocks, np.flatnonzero(np.diff(blocks) != BLOCK_BYTES) + 1)
    return max(runs, key=len)[: MOST_BYTES // BLOCK_BYTES]

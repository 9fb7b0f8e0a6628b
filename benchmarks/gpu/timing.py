"""Helpers that time work on the device, alone or beside other work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch


def elapsed_ms(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def gb_per_s(nbytes: int, ms: float) -> float:
    """Returns GB/s, or 0 if no time passed, as over a stand-in."""
    return nbytes / ms / 1e6 if ms > 0 else 0.0


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class Beside:
    """Work on another stream that lasts as long as what runs beside it."""

    def __init__(self, work: Callable[[], object]):
        self._work = work
        work()
        self._once = statistics.median(elapsed_ms(work) for _ in range(3))
        self._times = 1

    def last(self, ms: float) -> None:
        """Makes it last ``ms`` milliseconds from now on."""
        self._times = max(1, min(1000, math.ceil(ms / self._once))) if self._once > 0 else 1

    def run(self) -> None:
        for _ in range(self._times):
            self._work()

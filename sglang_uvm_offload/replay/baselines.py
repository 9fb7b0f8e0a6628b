"""Baseline policies to compare with the shipped one on a trace: what they keep in VRAM and move over the link.

Arrays are ``bool[layers, experts]``. A step is served as a whole: all its experts are looked up before any is replaced,
because per-access replay overstates a cache's misses. Fixed sets read each miss in place. Caches move each miss into VRAM once,
and keep the step's experts as far as they fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sglang_uvm_offload.policy.ranking import top

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Served:
    """The result of one step: activations served from VRAM, activations read in place, and experts moved into VRAM."""

    hit: np.ndarray
    read: np.ndarray
    moved: np.ndarray


class ReplayPolicy(Protocol):
    @property
    def resident(self) -> np.ndarray: ...

    def step(self, activated: np.ndarray) -> Served: ...


class Fixed:
    """Residents that never change."""

    def __init__(self, resident: np.ndarray):
        self.resident = resident

    def step(self, activated: np.ndarray) -> Served:
        return Served(activated & self.resident, activated & ~self.resident, np.zeros_like(activated))


Priority = Callable[[np.ndarray, np.ndarray, int], np.ndarray]
"""(uses so far, step of the last use, this step) -> each expert's priority to stay, all ``[layers, experts]``."""


def lru(uses: np.ndarray, last: np.ndarray, now: int) -> np.ndarray:
    return last


def lfu(uses: np.ndarray, last: np.ndarray, now: int) -> np.ndarray:
    """Uses since the start. Ties keep the more recent expert."""
    return uses + last / (now + 2)


def lfru(uses: np.ndarray, last: np.ndarray, now: int) -> np.ndarray:
    """Uses over age: recency weighted by frequency, after arXiv 2608.07911."""
    return uses / (now - last + 1)


class Cache:
    """Moves each miss into VRAM and evicts the lowest-priority residents that the step did not use.

    ``capacity`` is int ``[layers]``. If a step uses more experts than that, residents stay and the lowest ids are added.
    """

    def __init__(self, shape: tuple[int, int], capacity: np.ndarray, priority: Priority):
        self.resident = np.zeros(shape, dtype=bool)
        self._capacity, self._priority = capacity, priority
        self._uses = np.zeros(shape)
        self._last = np.full(shape, -1.0)
        self._now = 0

    def step(self, activated: np.ndarray) -> Served:
        hit, miss = activated & self.resident, activated & ~self.resident
        self._uses += activated
        self._last[activated] = self._now
        if miss.any():
            key = self._priority(self._uses, self._last, self._now)
            key = np.where(activated, np.inf, np.where(self.resident, key, -np.inf))
            self.resident = top(key, self._capacity, self.resident, activated | self.resident)
        self._now += 1
        return Served(hit, np.zeros_like(miss), miss)


class Belady:
    """Knows the future: keeps the experts that will be used soonest, and reads the others in place. No policy with as many
    residents per layer has a higher hit rate."""

    def __init__(self, future: np.ndarray, capacity: np.ndarray, idle_steps: int = 0):
        """``future``: ``bool[steps, layers, experts]``, the scored steps in order. Residents stay fixed during the
        ``idle_steps`` before them. ``capacity``: int ``[layers]``."""
        steps, layers, experts = future.shape
        self._capacity = capacity
        self._next_use = np.full((steps + 1, layers, experts), NEVER, dtype=np.int32)
        for step in range(steps - 1, -1, -1):
            self._next_use[step] = np.where(future[step], step, self._next_use[step + 1])
        self._now = -idle_steps
        self.resident = self._soonest(0, np.zeros((layers, experts), dtype=bool), np.ones((layers, experts), dtype=bool))

    def step(self, activated: np.ndarray) -> Served:
        self._now += 1
        before = self.resident
        hit, miss = activated & before, activated & ~before
        if miss.any() and self._now > 0:
            self.resident = self._soonest(self._now, before, activated | before)
        moved = self.resident & ~before
        return Served(hit, miss & ~moved, moved)

    def _soonest(self, now: int, resident: np.ndarray, candidate: np.ndarray) -> np.ndarray:
        return top(-self._next_use[now].astype(float), self._capacity, resident, candidate)


NAMES = ("first_n", "static", "static-oracle", "lru", "lfu", "lfru", "belady")


def make(name: str, warmup: np.ndarray, scored: np.ndarray, capacity: np.ndarray) -> ReplayPolicy:
    """The baseline ``name`` for a trace's steps, ``bool[steps, layers, experts]``: ``warmup`` is served first, then ``scored``.

    ``static`` knows the activations of the warm-up, ``static-oracle`` those of the scored part, ``belady`` each scored step.
    ``capacity``: int ``[layers]``. Raises ``ValueError`` for an unknown name.
    """
    shape = (warmup.shape[1], warmup.shape[2])
    nothing = np.zeros(shape, dtype=bool)
    profiles = {
        "first_n": lambda: np.zeros(shape),
        "static": lambda: warmup.sum(axis=0, dtype=float),
        "static-oracle": lambda: scored.sum(axis=0, dtype=float),
    }
    if name in profiles:
        return Fixed(top(profiles[name](), capacity, nothing, ~nothing))
    if name == "belady":
        return Belady(scored, capacity, idle_steps=len(warmup))
    priorities = {"lru": lru, "lfu": lfu, "lfru": lfru}
    if name not in priorities:
        raise ValueError(f"no baseline is named {name}; there are {', '.join(NAMES)}")
    return Cache(shape, capacity, priorities[name])

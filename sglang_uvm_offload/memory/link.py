"""Measured rates of the link between GPUs and host memory, and why they are below the expected ones.

Zero-copy read rates differ between machines with the same link, and between one busy GPU and all of them (published:
``plan/links``). So a server measures its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta

Rate = Annotated[float, Meta(gt=0, le=1e6)]
"""A rate in 1e9 bytes/s."""

ALONE_SECONDS, TOGETHER_SECONDS = 0.015, 0.04
"""Seconds per rate, with one rank at a time and with all together: 0.64 s for eight ranks, plus their first calls."""

NEAR = 0.85
"""A rate of at least this share of another counts as equal to it."""


@dataclass(frozen=True)
class LinkRates:
    """The rates of one GPU reading experts in managed memory in host RAM."""

    sequential: Rate
    """Zero-copy reads of neighbouring blocks by a kernel."""
    scattered: Rate
    """Zero-copy reads of expert-sized pieces from all offloaded memory, as in a decode step."""
    copied: Rate
    """Copies of neighbouring blocks to VRAM by the kernel that fills stream buffers and slots."""
    engine: Rate
    """The same copies by the copy engine."""

    @classmethod
    def slowest(cls, several: Sequence[LinkRates]) -> LinkRates:
        """The minimum of each rate, which limits GPUs that wait for each other."""
        return cls(*(min(getattr(one, rate.name) for one in several) for rate in dataclasses.fields(cls)))


@dataclass(frozen=True)
class MeasuredLink:
    """The link as measured by the ranks of a server; the slowest rank counts."""

    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]
    alone: LinkRates
    """Measured while the other ranks waited."""
    together: LinkRates
    """Measured by all ranks at once."""

    def why_slow(self, engine: float) -> list[str]:
        """Why experts are read more slowly than expected. ``engine`` is the expected rate of the copy engine, 0 if unknown."""
        alone, together = self.alone, self.together
        found = []
        if alone.engine < NEAR * engine:
            found.append(
                f"the copy engine alone reaches {alone.engine:.1f} of {engine:g} GB/s: the link may run at fewer lanes or an "
                "older generation than the GPU supports (nvidia-smi -q -d PCIE), or host memory is on another socket"
            )
        if together.scattered < NEAR * alone.scattered:
            found.append(
                f"{self.ranks} GPUs share the {alone.scattered:.1f} GB/s that one alone reads (a PCIe switch, or the memory of "
                "one socket)"
            )
        if alone.scattered < NEAR * alone.sequential:
            found.append(
                f"neighbouring blocks are read at {alone.sequential:.1f} GB/s, so address translation is the bottleneck (small "
                "host pages or the IOMMU; run doctor)"
            )
        if alone.sequential < NEAR * alone.engine:
            found.append(f"kernels read more slowly than the copy engine copies ({alone.engine:.1f} GB/s) on this machine")
        return found

    def described(self) -> str:
        """The rates in one line."""
        line = _rates(self.together)
        return line if self.ranks == 1 else f"{line} with {self.ranks} GPUs at once; one alone: {_rates(self.alone)}"


@dataclass(frozen=True)
class LinkStatus:
    """The link as measured after loading experts, and the expected rate."""

    measured: MeasuredLink
    expected: Annotated[float, Meta(ge=0, le=1e6)]
    """The expected rate of scattered reads in 1e9 bytes/s, 0 if this GPU's link is unknown."""
    because: list[str]
    """Why reads are slower than expected."""

    def verdict(self) -> str:
        read = self.measured.together.scattered
        expected = f", {self.expected:.1f} expected" if self.expected else ""
        return f"this machine reads offloaded experts at {read:.1f} GB/s{expected}"


class Offloaded(NamedTuple):
    """The blocks of one tensor that are in host RAM (int64 addresses, in order), and its bytes per expert."""

    blocks: np.ndarray
    expert_bytes: int


class LinkTimer(Protocol):
    """Times reads and copies of offloaded experts, without modifying them."""

    def rates(self, seconds: float, wait: Callable[[], object]) -> LinkRates:
        """Measure each of the ``TIMED`` rates for about ``seconds``, calling ``wait`` before each. Raises ``RuntimeError``."""

    def close(self) -> None:
        """Free its VRAM."""


TIMED = len(dataclasses.fields(LinkRates))


def _rates(rates: LinkRates) -> str:
    return (
        f"scattered reads {rates.scattered:.1f} GB/s, sequential {rates.sequential:.1f}, copies by a kernel "
        f"{rates.copied:.1f}, by the copy engine {rates.engine:.1f}"
    )

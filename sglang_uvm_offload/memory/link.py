"""The measured rates of the link between GPUs and host memory, and why they are below what was expected.

How fast kernels read host memory in place differs between machines with the same link, and between one GPU at work and all
(published: ``plan/links``). So a server measures its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta

Rate = Annotated[float, Meta(gt=0, le=1e6)]
"""1e9 bytes a second."""

ALONE_SECONDS, TOGETHER_SECONDS = 0.015, 0.04
"""For each rate, of each rank in turn and of all at once: 0.64 s for eight ranks, and their first calls."""

NEAR = 0.85
"""The share of a rate from which another one is about as high."""


@dataclass(frozen=True)
class LinkRates:
    """Of one GPU. Experts lie in managed memory in host RAM."""

    sequential: Rate
    """A kernel reads neighbouring blocks in place."""
    scattered: Rate
    """A kernel reads pieces of the size of an expert, from all of what is offloaded, as a decode step does."""
    copied: Rate
    """The kernel that fills stream buffers and slots copies neighbouring blocks to VRAM."""
    engine: Rate
    """The copy engine does."""

    @classmethod
    def slowest(cls, several: Sequence[LinkRates]) -> LinkRates:
        """The lowest of each rate, at which GPUs that wait for each other work."""
        return cls(*(min(getattr(one, rate.name) for one in several) for rate in dataclasses.fields(cls)))


@dataclass(frozen=True)
class MeasuredLink:
    """The link as the ranks of a server have measured it: the slowest of them."""

    ranks: Annotated[int, Meta(ge=1, le=1 << 16)]
    alone: LinkRates
    """While the others waited."""
    together: LinkRates
    """While all did the same."""

    def why_slow(self, engine: float) -> list[str]:
        """Why experts are read more slowly than they should be. ``engine``: the expected rate of the copy engine, 0 if
        unknown."""
        alone, together = self.alone, self.together
        found = []
        if alone.engine < NEAR * engine:
            found.append(
                f"the copy engine alone reaches {alone.engine:.1f} of {engine:g} GB/s: the link may have fewer lanes or an "
                "older generation than the GPU (nvidia-smi -q -d PCIE), or host memory is on another socket"
            )
        if together.scattered < NEAR * alone.scattered:
            found.append(
                f"{self.ranks} GPUs share what one alone reads at {alone.scattered:.1f} GB/s (a switch, or the memory "
                "of a socket)"
            )
        if alone.scattered < NEAR * alone.sequential:
            found.append(
                f"neighbouring blocks are read at {alone.sequential:.1f} GB/s, so translating addresses takes the time (small "
                "host pages, or the IOMMU: doctor)"
            )
        if alone.sequential < NEAR * alone.engine:
            found.append(f"kernels read more slowly than the copy engine copies ({alone.engine:.1f} GB/s) on this machine")
        return found

    def described(self) -> str:
        """Its rates, in one line."""
        line = _rates(self.together)
        return line if self.ranks == 1 else f"{line}, {self.ranks} at once; one alone {_rates(self.alone)}"


@dataclass(frozen=True)
class LinkStatus:
    """The link as measured when experts were loaded, beside what was expected of it."""

    measured: MeasuredLink
    expected: Annotated[float, Meta(ge=0, le=1e6)]
    """1e9 bytes a second at which scattered experts would be read, 0 where this GPU's link is unknown."""
    because: list[str]
    """Why they are read more slowly."""

    def verdict(self) -> str:
        read = self.measured.together.scattered
        expected = f", {self.expected:.1f} expected" if self.expected else ""
        return f"this machine reads offloaded experts at {read:.1f} GB/s{expected}"


class Offloaded(NamedTuple):
    """The blocks of one tensor in host RAM (int64, addresses, in order), and the bytes of an expert in it."""

    blocks: np.ndarray
    expert_bytes: int


class LinkTimer(Protocol):
    """Times reads and copies of offloaded experts, which change nothing."""

    def rates(self, seconds: float, wait: Callable[[], object]) -> LinkRates:
        """Each of the ``TIMED`` rates takes about ``seconds``, and ``wait`` is called before it. Raises ``RuntimeError``."""

    def close(self) -> None:
        """Give back its VRAM."""


TIMED = len(dataclasses.fields(LinkRates))


def _rates(rates: LinkRates) -> str:
    return (
        f"scattered reads {rates.scattered:.1f} GB/s, sequential {rates.sequential:.1f}, copies by a kernel "
        f"{rates.copied:.1f}, by the copy engine {rates.engine:.1f}"
    )

"""Link rates as servers measure them, in 1e9 bytes per second."""

from __future__ import annotations

from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.memory.link import LinkRates, LinkStatus, MeasuredLink


def rates(sequential: float = 51.0, scattered: float = 50.0, copied: float = 50.0, engine: float = 54.0) -> LinkRates:
    return LinkRates(sequential, scattered, copied, engine)


def measured(ranks: int = 1, alone: LinkRates | None = None, **together: float) -> MeasuredLink:
    """Makes a measured link. ``alone`` defaults to the rates together."""
    return MeasuredLink(ranks, alone or rates(**together), rates(**together))


def kept(ranks: int = 1, **together: float) -> KeptLink:
    return KeptLink(tuple(f"gpu {index}" for index in range(ranks)), 1.7e9, measured(ranks, **together))


def status(expected: float = 51.7, because: tuple[str, ...] = (), **together: float) -> LinkStatus:
    return LinkStatus(measured(**together), expected, list(because))

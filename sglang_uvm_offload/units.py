"""Human-readable sizes, and bounds for numbers in records from outside."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
Listed = Meta(max_length=1 << 10)
"""The bound of a list that a rank keeps short."""


def size(nbytes: float) -> str:
    """``nbytes`` in GiB, or in MiB below 1 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.1f} MiB"

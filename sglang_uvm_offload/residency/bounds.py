"""The bounds of numbers in a status record, which may come from outside."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
Listed = Meta(max_length=1 << 10)
"""Of a list that a rank keeps short."""
Amount = Annotated[float, Meta(ge=0, le=1e15)]

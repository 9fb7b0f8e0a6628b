"""Numbers as reports show them: percentages, byte units for axes, and axes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """An axis of a chart, from ``low`` to ``high``, which must differ; ``label`` includes the unit."""

    label: str
    low: float
    high: float
    whole: bool = False
    """Whether only whole numbers make sense."""


PERCENT = Axis("hit rate, %", 0, 100)
LEAST = 1e-30
"""An axis that ends below this shows nothing."""


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def change(before: float, after: float) -> float:
    """The difference in points between two shares, rounded as ``percent`` rounds them: a reader who subtracts gets the same."""
    return round(round(100 * after, 1) - round(100 * before, 1), 1)


def points(before: float, after: float) -> str:
    return f"{change(before, after):.1f} points"


def percents(shares: Iterable[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """``(x, share)`` as the points of a line over ``PERCENT``."""
    return [(x, None if share is None else 100 * share) for x, share in shares]


def axis_to(label: str, most: float, whole: bool = False) -> Axis:
    """An axis from 0 to a little above ``most``."""
    return Axis(label, 0, 1.05 * most if most > LEAST else 1, whole)


def byte_unit(most: float) -> tuple[float, str]:
    """The unit, in bytes and by name, for an axis that shows ``most`` bytes."""
    return (2.0**30, "GiB") if most >= 2**30 else (2.0**20, "MiB") if most >= 2**20 else (2.0**10, "KiB")


def duration(seconds: float) -> str:
    """``seconds`` in the largest unit of which there are at least 2."""
    units = ((86400, "days"), (3600, "hours"), (60, "minutes"))
    return next((f"{seconds / each:.1f} {unit}" for each, unit in units if seconds >= 2 * each), f"{seconds:.0f} seconds")

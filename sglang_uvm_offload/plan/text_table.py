"""Tables, ranges and counts as text."""

from __future__ import annotations

from collections.abc import Sequence


def between(least: float, most: float, form: str) -> str:
    """A range, or one number where both look the same."""
    low, high = format(least, form), format(most, form)
    return low if low == high else f"{low} to {high}"


def two_digits(value: float) -> float:
    """``value`` rounded to two significant digits."""
    return float(f"{value:.2g}")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count != 1 else "")


def table(rows: Sequence[Sequence[str]]) -> str:
    width = max(map(len, rows))
    # The last cell of a shorter row may be long, and sets no column width.
    cells = [(*row, *("" for _ in range(width - len(row)))) for row in rows]
    widths = [max(len(r[c]) for r in rows if c < len(r) and (len(r) == width or c == 0)) for c in range(width)]
    return "\n".join("  ".join(f"{cell:<{room}}" for cell, room in zip(row, widths, strict=True)).rstrip() for row in cells)

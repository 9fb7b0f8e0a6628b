"""The rows of a result file, which parts write and the session reads: labels, a unit, and every repeat.

The session starts a part as ``PROGRAM PART ROWS_FILE SECONDS [--small]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PartRows = Mapping[str, Sequence[Row]]
"""Rows by part, for each part that has any."""


class Rows:
    """Appends rows to a file and flushes each, so that a part that dies leaves its rows."""

    def __init__(self, path: Path, seconds: float, small: bool, part: str = ""):
        self._file = path.open("a")
        self.part = part
        self._deadline = time.monotonic() + seconds
        self.small = small
        """Whether to use sizes that suit a stand-in driver."""
        self.cut_short = False

    def put(self, row: str, unit: str, values: Iterable[float], **labels: Any) -> None:
        line = {"row": row, **labels, "unit": unit, "values": [float(value) for value in values]}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def late(self) -> bool:
        """Whether the part must begin nothing more. If this returns True, the part counts as cut short."""
        self.cut_short |= time.monotonic() > self._deadline
        return self.cut_short

    def left(self) -> float:
        """Seconds left in which the part may begin something."""
        return max(0.0, self._deadline - time.monotonic())

    def pick(self, real: int, toy: int) -> int:
        return toy if self.small else real

    def close(self) -> None:
        self.put("finished", "bool", [not self.cut_short])
        self._file.close()


def run_part(parts: Mapping[str, Callable[[Rows], None]]) -> None:
    """The main program of a part module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=sorted(parts))
    parser.add_argument("rows", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--small", action="store_true")
    wanted = parser.parse_args()
    rows = Rows(wanted.rows, wanted.seconds, wanted.small, wanted.part)
    parts[wanted.part](rows)
    rows.close()


def read_rows(path: Path) -> list[Row]:
    """Reads a file's complete lines and adds median and spread. A killed part may leave half a line at the end."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(summarise(json.loads(line)))
        except json.JSONDecodeError:
            break
    return rows


def summarise(row: Row) -> Row:
    values = row["values"]
    if not values:
        return row
    return {**row, "median": statistics.median(values), "low": min(values), "high": max(values)}


def find(rows: Iterable[Row], row: str, **labels: str | float) -> list[Row]:
    """Returns the rows of this name with these labels that have at least one value."""
    return [
        each
        for each in rows
        if each["row"] == row and each["values"] and all(each.get(name) == value for name, value in labels.items())
    ]


def one(parts: PartRows, part: str, row: str, **labels: str | float) -> Row | None:
    """Returns the part's first row of this name with these labels, else None."""
    return next(iter(find(parts.get(part, ()), row, **labels)), None)


def best(rows: Sequence[Row]) -> Row | None:
    """Returns the row with the highest median, None if there is none."""
    return max(rows, key=lambda row: row["median"], default=None)


def show(row: Row) -> str:
    """Formats a row, such as "52.1 GB/s (51.7 to 52.4, 7 repeats)"."""
    many = f" ({row['low']:.4g} to {row['high']:.4g}, {len(row['values'])} repeats)" if len(row["values"]) > 1 else ""
    return f"{row['median']:.4g} {row['unit']}{many}"

"""Lines of a result file, as the parts write them and the session reads them: labels, a unit, and every repeat.

A part is started as ``PROGRAM PART ROWS_FILE SECONDS [--small]``.
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
"""The rows of each part that has any."""


class Rows:
    """Appends rows to a file, each flushed, so that a part that dies leaves what it had."""

    def __init__(self, path: Path, seconds: float, small: bool, part: str = ""):
        self._file = path.open("a")
        self.part = part
        self._deadline = time.monotonic() + seconds
        self.small = small
        """Sizes that a stand-in driver bears."""
        self.cut_short = False

    def put(self, row: str, unit: str, values: Iterable[float], **labels: Any) -> None:
        line = {"row": row, **labels, "unit": unit, "values": [float(value) for value in values]}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def late(self) -> bool:
        """Whether the part must begin nothing more. Once it was asked in vain the part counts as cut short."""
        self.cut_short |= time.monotonic() > self._deadline
        return self.cut_short

    def left(self) -> float:
        """Seconds in which something may still begin."""
        return max(0.0, self._deadline - time.monotonic())

    def pick(self, real: int, toy: int) -> int:
        return toy if self.small else real

    def close(self) -> None:
        self.put("finished", "bool", [not self.cut_short])
        self._file.close()


def run_part(parts: Mapping[str, Callable[[Rows], None]]) -> None:
    """The main program of a module of parts."""
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
    """The complete lines of a file, with median and spread. A part that was killed may leave half a line at the end."""
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
    """The rows of that name with these labels that hold at least one value."""
    return [
        each
        for each in rows
        if each["row"] == row and each["values"] and all(each.get(name) == value for name, value in labels.items())
    ]


def one(parts: PartRows, part: str, row: str, **labels: str | float) -> Row | None:
    """The first of the part's rows with these labels."""
    return next(iter(find(parts.get(part, ()), row, **labels)), None)


def best(rows: Sequence[Row]) -> Row | None:
    """The one with the highest median."""
    return max(rows, key=lambda row: row["median"], default=None)


def show(row: Row) -> str:
    """Such as "52.1 GB/s (51.7 to 52.4, 7 repeats)"."""
    many = f" ({row['low']:.4g} to {row['high']:.4g}, {len(row['values'])} repeats)" if len(row["values"]) > 1 else ""
    return f"{row['median']:.4g} {row['unit']}{many}"

"""The least time of a server's step: a resident server's, and each missed byte once over the link at its measured rate.

A step at this bound is as fast as offloading can be with these residents: what is missing to a goal then is the link's. Above
it, time is lost to something else. Reads and computation may overlap, so a step can also be somewhat below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.rows import PartRows, Row, best, find, show

Ratio = tuple[float, str]


def link_rate(rows: PartRows) -> Row | None:
    """The best zero-copy read of host memory that the part ``link`` saw."""
    memories = ("managed", "pinned", "host_numa")
    return best([row for row in find(rows.get("link", ()), "zero_copy") if row["memory"] in memories])


def over_the_bound(kind: str, contender: str, *parts: str) -> Callable[[PartRows], Ratio | None]:
    """The worst ratio of a contender's time to the least that its reads allow, over the sizes of these parts."""

    def ratio(rows: PartRows) -> Ratio | None:
        link = link_rate(rows)
        if link is None:
            return None
        found = []
        for mine, resident, residency in pairs(rows, kind, contender, parts):
            reading = mine["read_bytes"] / (1e9 * link["median"])
            times = [f"{1e3 * seconds:.4g} ms" for seconds in (mine["seconds"], resident["seconds"], reading)]
            missed = f"{mine['read_bytes'] / 1e9:.4g} GB at {show(link)}"
            words = f"{kind} {mine['size']}, {residency:.0%} resident: {times[0]}; all resident {times[1]}, {missed} {times[2]}"
            found.append((mine["seconds"] / (resident["seconds"] + reading), words))
        return max(found, default=None)

    return ratio


def pairs(rows: PartRows, kind: str, contender: str, parts: tuple[str, ...]) -> Iterator[tuple[Any, Any, float]]:
    """Each figure of the contender beside the resident server's of the same part and size, and the contender's residency."""
    for part in parts:
        cells = [row["cell"] for row in rows.get(part, ()) if row["row"] == "cell"]
        resident = {key: point for cell in cells if cell["contender"] == "resident" for key, point in points(cell)}
        for cell in cells:
            for key, point in points(cell):
                if cell["contender"] == contender and key[0] == kind and "read_bytes" in point and key in resident:
                    yield point, resident[key], cell["residency"]


def points(cell: dict[str, Any]) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """The cell's figures by kind and size."""
    for point in cell["points"]:
        if not point["error"]:
            yield (point["kind"], point["size"]), point

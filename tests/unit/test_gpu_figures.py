"""The lines that a GPU session prints of its rows."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.figures import NOTHING, lines_of
from benchmarks.gpu.rows import summarise


def row(name: str, values: list[float], unit: str = "ms", **labels: Any) -> dict[str, Any]:
    return summarise({"row": name, "unit": unit, "values": values, **labels})


def test_every_row_has_a_line_with_its_labels_median_and_spread():
    rows = [row("load", [2.0, 1.0, 9.0], "GB/s", where="in place", batch=4, missed_gb=0.123456), row("startup", [87.0])]
    assert lines_of(rows) == ["load, in place, batch 4, missed_gb 0.1235: 2 (1-9) GB/s", "startup: 87 ms"]


def test_a_server_that_failed_is_told_with_its_reason():
    failed = {"contender": "paged_experts", "residency": 0.5, "error": "it did not start"}
    assert lines_of([row("cell", [], "", cell=failed)]) == ["paged_experts 50%: it did not start"]
    assert lines_of([row("finished", [1.0])]) == NOTHING

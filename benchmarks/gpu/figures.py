"""Formats the rows of a part: one line each, with labels, median and spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.rows import Row

NO_LABELS = {"row", "unit", "values", "median", "low", "high"}
NOTHING = ["no figures yet"]


def lines_of(rows: Sequence[Row]) -> list[str]:
    lines = [line(row) for row in rows if row["values"] and row["row"] != "finished"]
    return [*lines, *(text for row in rows if row["row"] == "cell" for text in server(row["cell"]))] or NOTHING


def line(row: Row) -> str:
    """Formats a row, such as "load, frequency, resident 0.5: 0.55 (0.5-0.6) s a GiB"."""
    spread = f" ({row['low']:.4g}-{row['high']:.4g})" if len(row["values"]) > 1 else ""
    name = ", ".join(filter(None, (row["row"], labels(row))))
    return f"{name}: {row['median']:.4g}{spread} {row['unit']}".rstrip()


def labels(row: Row) -> str:
    """Formats labels, such as "batch 4, in place": a number needs its name, a word does not."""
    found = {name: value for name, value in row.items() if name not in NO_LABELS and isinstance(value, str | int | float)}
    return ", ".join(value if isinstance(value, str) else f"{name} {text(value)}" for name, value in found.items())


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def server(described: dict[str, Any]) -> list[str]:
    """Says why a server failed, which backends SGLang chose, and how many logged batches ran as CUDA graphs."""
    name = f"{described['contender']} {described['residency']:.0%}"
    lines = [f"{name}: {described['error']}"] if described["error"] else []
    if engine := described.get("engine"):
        seen = [f"{phase} {n['graph']} of {n['graph'] + n['eager']}" for phase, n in engine["batches"].items()]
        lines.append(
            f"{name}: attention {engine['attention_backend']}, experts {engine['moe_runner_backend']}, "
            f"{len(engine['decode_graph_batches'])} decode graphs; logged batches that ran as graphs: {', '.join(seen)}"
        )
    return lines

"""What the rows of a part say: a table of medians with their spread for each kind of row, whatever its labels are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.gpu.rows import Row

NO_LABELS = {"row", "unit", "values", "median", "low", "high", "reason"}
MOST_COLUMNS = 8
"""Of a table, beside the one with the names of its lines."""
NOTHING = ["no figures yet"]


def lines_of(rows: Sequence[Row]) -> list[str]:
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row["values"] and row["row"] not in ("finished", "computes"):
            kinds.setdefault(row["row"], []).append(row)
    lines = [line for kind, found in kinds.items() for line in table(kind, found)]
    lines += [f"{named(row, labels_of([row]))}: {row['reason']}" for row in rows if "reason" in row]
    cells = [row["cell"] for row in rows if row["row"] == "cell"]
    return [*lines, *(line for cell in cells for line in server(cell))] or NOTHING


def table(kind: str, rows: Sequence[Row]) -> list[str]:
    """Columns are the values of the label that leaves the fewest empty cells; where most would be empty, or all stand in one
    line, each row has a line of its own."""
    labels = labels_of(rows)
    varying = [name for name in labels if len(values(rows, name)) > 1]
    alike = named(rows[0], [name for name in labels if name not in varying])
    title = f"{kind}, {alike}" if alike else kind
    fullest = max(varying, key=lambda name: (density(rows, varying, name), varying.index(name)), default="")
    down = [name for name in varying if name != fullest]
    if not down or density(rows, varying, fullest) <= 0.5:
        return [f"{', '.join(filter(None, (title, named(row, varying))))}: {cell(row)} {row['unit']}".rstrip() for row in rows]
    one_unit = len({row["unit"] for row in rows}) == 1
    body: dict[str, dict[Any, list[Row]]] = {}
    for row in rows:
        body.setdefault(named(row, down), {}).setdefault(row.get(fullest), []).append(row)
    heads = list(values(rows, fullest))
    head = [f"{title}, {rows[0]['unit']}" if one_unit else title, *(named({fullest: each}, [fullest]) for each in heads)]
    return aligned([head, *([name, *(cells(found.get(each, ()), one_unit) for each in heads)] for name, found in body.items())])


def density(rows: Sequence[Row], labels: Sequence[str], across: str) -> float:
    """The share of the cells that hold a row; 0 where there were too many columns."""
    heads = values(rows, across)
    lines = {named(row, [name for name in labels if name != across]) for row in rows}
    return len(rows) / (len(heads) * len(lines)) if len(heads) <= MOST_COLUMNS else 0.0


def labels_of(rows: Iterable[Row]) -> list[str]:
    return [*dict.fromkeys(name for row in rows for name, value in row.items() if name not in NO_LABELS and plain(value))]


def plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool)


def values(rows: Iterable[Row], label: str) -> dict[Any, None]:
    return dict.fromkeys(row.get(label) for row in rows)


def named(row: Row, labels: Sequence[str]) -> str:
    """Such as "batch 4, in place": a word says for itself what it is, a number does not."""
    found = [(name, row[name]) for name in labels if row.get(name) is not None]
    return ", ".join(value if isinstance(value, str) else f"{name} {text(value)}" for name, value in found)


def text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def cells(rows: Sequence[Row], one_unit: bool) -> str:
    """Several where a measurement was made again."""
    return " / ".join(cell(row) + ("" if one_unit else f" {row['unit']}") for row in rows) or "-"


def cell(row: Row) -> str:
    spread = f" ({row['low']:.4g}-{row['high']:.4g})" if len(row["values"]) > 1 else ""
    return f"{row['median']:.4g}{spread}"


def aligned(body: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    return ["  ".join(one.ljust(width) for one, width in zip(line, widths, strict=True)).rstrip() for line in body]


def server(described: dict[str, Any]) -> list[str]:
    """Why a server failed, what SGLang chose for it, and which of the batches in its log ran as graphs."""
    name = f"{described['contender']} {described['residency']:.0%}"
    lines = [f"{name}: {described['error']}"] if described["error"] else []
    if engine := described.get("engine"):
        seen = [f"{phase} {n['graph']} of {n['graph'] + n['eager']}" for phase, n in engine["batches"].items()]
        lines.append(
            f"{name}: attention {engine['attention_backend']}, experts {engine['moe_runner_backend']}, "
            f"{len(engine['decode_graph_batches'])} decode graphs; logged batches that ran as graphs: {', '.join(seen)}"
        )
    return lines

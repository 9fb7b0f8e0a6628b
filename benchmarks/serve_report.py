"""Writes the report of a run of ``serve.py`` as Markdown tables. Pure: JSON in, files out.

    python -m benchmarks.serve_report FOLDER              # writes FOLDER/report.md beside its run.json
    python -m benchmarks.serve_report SECTION.json OUT    # the same from a section of a GPU session

Ratios are ratios of medians over all repeats and samples: a contender's over the resident server's in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
RUN_BYTES = 64 << 20
"""Larger files are not read: a run's JSON is some hundred kilobytes."""
Record = dict[str, Any]
Row = dict[str, Any]
Cell = tuple[str, float]
RESIDENT: Cell = ("resident", 1.0)
NO_SPEED = (
    "speed means nothing here: no GPU took part. What counts is whether answers are equal, what is accounted, and what fails"
)


class NotARun(ValueError):
    """The file holds no run. The message names the file and the reason."""


def load(path: Path) -> Record:
    """Loads a run from a folder's ``run.json``, or from the JSON of a section of a GPU session."""
    path = path / "run.json" if path.is_dir() else path
    if not path.is_file():
        raise NotARun(f"{path}: no such file; a run is a folder with a run.json")
    if path.stat().st_size > RUN_BYTES:
        raise NotARun(f"{path}: {path.stat().st_size} bytes, and a run has at most {RUN_BYTES}")
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise NotARun(f"{path}: no JSON ({error})") from None
    if isinstance(record, dict) and "parts" in record:
        record = from_section(record, path)
    if not isinstance(record, dict) or record.get("format") != FORMAT or not isinstance(record.get("rows"), list):
        raise NotARun(f"{path}: no run of format {FORMAT}")
    return record


def from_section(section: Record, path: Path) -> Record:
    """Merges the runs of a section's parts and adds the link rates that it measured. Each part has its own resident server, so
    repeats are numbered consecutively over the parts."""
    merged: Record = {}
    repeats = 0
    for part in section["parts"].values():
        rows = [row["cell"] for row in part.get("rows", []) if row["row"] == "cell"]
        heads = [row["run"] for row in part.get("rows", []) if row["row"] == "run"]
        if not rows or not heads:
            continue
        merged = merged or {**heads[0], "rows": [], "residencies": []}
        merged["rows"] += [{**row, "repeat": row["repeat"] + repeats} for row in rows]
        merged["residencies"] = sorted({*merged["residencies"], *heads[0]["residencies"]}, reverse=True)
        repeats = max(row["repeat"] for row in merged["rows"])
    if not merged:
        raise NotARun(f"{path}: none of its parts served anything")
    link = section["parts"].get("link", {}).get("rows", [])
    return merged | {"repeats": repeats, "measured": section["measured"], "link": link}


# ---- figures ----


def cells(record: Record) -> list[Cell]:
    """Returns contenders with residencies, in the order they were served."""
    return list(dict.fromkeys((row["contender"], row["residency"]) for row in record["rows"]))


def rows_of(record: Record, cell: Cell) -> list[Row]:
    return [row for row in record["rows"] if (row["contender"], row["residency"]) == cell]


def samples(record: Record, cell: Cell, kind: str, size: int) -> list[float]:
    """Returns every sample of one figure over all repeats."""
    return [
        sample
        for row in rows_of(record, cell)
        for point in row["points"]
        if (point["kind"], point["size"]) == (kind, size)
        for sample in point.get("samples", ())
    ]


def ratio(record: Record, cell: Cell, kind: str, size: int) -> tuple[float, float, float] | None:
    """Returns the time over the resident server's: (ratio of medians, lowest and highest ratio of a repeat). None if either has
    no figure."""
    mine, theirs = samples(record, cell, kind, size), samples(record, RESIDENT, kind, size)
    if not mine or not theirs:
        return None
    by_repeat = []
    for row in rows_of(record, cell):
        one = {**record, "rows": [each for each in record["rows"] if each["repeat"] == row["repeat"]]}
        top, bottom = samples(one, cell, kind, size), samples(one, RESIDENT, kind, size)
        if top and bottom:
            by_repeat.append(statistics.median(top) / statistics.median(bottom))
    whole = statistics.median(mine) / statistics.median(theirs)
    return whole, min([*by_repeat, whole]), max([*by_repeat, whole])


def sizes(record: Record, kind: str) -> list[int]:
    return sorted({point["size"] for row in record["rows"] for point in row["points"] if point["kind"] == kind})


def failures(record: Record) -> list[tuple[str, str]]:
    """Returns (where, why) for everything that was not served, each reason once."""
    found: dict[str, str] = {}
    for row in record["rows"]:
        name = cell_name((row["contender"], row["residency"]))
        if row["error"]:
            found.setdefault(name, row["error"])
        points = [(f"{point['kind']} {point['size']}", point["error"]) for point in row["points"] if point["error"]]
        for where, why in points:
            found.setdefault(f"{name}, {where}", why)
    return list(found.items())


def cell_name(cell: Cell) -> str:
    return cell[0] if cell[0] == RESIDENT[0] else f"{cell[0]} {cell[1]:.0%}"


def line(row: Row) -> str:
    """Formats a row as one line of progress output."""
    name = f"repeat {row['repeat']}, {cell_name((row['contender'], row['residency']))}"
    if row["error"]:
        return f"{name}: FAILED: {row['error']}"
    failed = sum(bool(point["error"]) for point in row["points"])
    same = {True: "same answers", False: "OTHER ANSWERS", None: "answers not compared"}[row["outputs"]["same"]]
    return f"{name}: started in {row['startup_seconds']:.1f} s, {len(row['points']) - failed} figures, {failed} failed, {same}"


# ---- Markdown ----


def markdown(record: Record) -> str:
    model, env = record["model"], record["environment"]
    lines = ["# One checkpoint, one VRAM budget, every way to serve it", ""]
    ran_on = f"Ran on {record['device']}, {record['started'][:10]}"
    lines += [f"{ran_on}: **{NO_SPEED}.**" if not record["measured"] else f"{ran_on}, driver {env.get('driver')}.", ""]
    lines += [
        f"{model['name']} ({model['architecture']}): {model['moe_layers']} MoE layers of {model['experts']} experts, "
        f"{model['top_k']} a token; routed experts are {size_text(model['expert_bytes'])} of "
        f"{size_text(model['total_bytes'])}. "
        f"SGLang {env.get('sglang')}, torch {env.get('torch')}. {count(record['repeats'], 'server')} of each "
        f"contender, in turns." + (f" For all servers: `{' '.join(record['server_args'])}`." if record["server_args"] else ""),
        "",
    ]
    lines += ["## Served", "", *summary_table(record), ""]
    lines += ["## Decode: time per token over the resident server's", "", sentence(record["methods"]["decode"]), ""]
    lines += [*ratio_table(record, "decode", "batch"), ""]
    lines += ["## Prefill: time over the resident server's", "", sentence(record["methods"]["prefill"]), ""]
    lines += [*ratio_table(record, "prefill", "tokens"), ""]
    if read := read_table(record):
        lines += ["## Experts read over the link in one decode step, counted", "", *read, ""]
    lines += ["## Not served", ""]
    lines += [f"- {where}: {why}" for where, why in failures(record)] or ["Everything was served."]
    notes = {row["contender"]: row["note"] for row in record["rows"] if row.get("note")}
    lines += ["", *(f"{name}: {note}." for name, note in notes.items())]
    return "\n".join(lines).rstrip() + "\n"


def count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body]]


def summary_table(record: Record) -> list[str]:
    """Makes the table of equality, start-up and memory, with one line per cell, served or not."""
    body = []
    for cell in cells(record):
        rows = rows_of(record, cell)
        served = [row for row in rows if not row["error"]]
        equal = {row["outputs"]["same"] for row in rows}
        answers = "**no**" if False in equal else "yes" if equal == {True} else "not compared"
        offload = [row["offload"] for row in served if row.get("offload")]
        body.append(
            [
                cell_name(cell),
                record["contenders"][cell[0]]["what"],
                f"{len(served)} of {len(rows)}",
                "the reference" if cell == RESIDENT else answers,
                number(middle(row.get("startup_seconds") for row in served)),
                size_text(middle(state["offloaded_bytes"] for state in offload)),
                *(
                    size_text(middle(row["memory"][name] for row in served if "memory" in row))
                    for name in [*MEMORY][: memory_columns(record)]
                ),
                number(middle(state["hit_rate"] for state in offload)),
            ]
        )
    memory = [*MEMORY.values()][: memory_columns(record)]
    return table(["contender", "what", "served", "same answers", "start, s", "offloaded", *memory, "hit rate"], body)


MEMORY = {"host_pss_bytes": "host RAM, processes", "vram_bytes": "VRAM", "host_available_lost_bytes": "host RAM, machine"}


def memory_columns(record: Record) -> int:
    """Without a GPU only the processes' memory counts: the machine's loss includes other programs."""
    return 3 if record["measured"] else 1


def ratio_table(record: Record, kind: str, unit: str) -> list[str]:
    """Makes a table with the resident server's time in the first line and ratios below."""
    found = sizes(record, kind)
    body = []
    for cell in cells(record):
        texts = []
        for size in found:
            ratios = ratio(record, cell, kind, size)
            if cell == RESIDENT:
                seconds = samples(record, cell, kind, size)
                texts.append(f"{1e3 * statistics.median(seconds):.3g} ms" if seconds else "-")
            else:
                texts.append(f"{ratios[0]:.2f} ({ratios[1]:.2f} to {ratios[2]:.2f})" if ratios else "-")
        body.append([cell_name(cell), *texts])
    return table(["contender", *(f"{unit} {size}" for size in found)], body)


def read_table(record: Record) -> list[str]:
    """Makes the table of bytes of offloaded experts that the plugin counted: a lower bound, because an expert counts once per
    step. Empty if there are none."""
    found = sizes(record, "decode")
    body = []
    for cell in cells(record):
        points = [point for row in rows_of(record, cell) for point in row["points"] if point["kind"] == "decode"]
        read = [middle(point.get("read_bytes") for point in points if point["size"] == size) for size in found]
        if any(nbytes is not None for nbytes in read):
            body.append([cell_name(cell), *map(size_text, read)])
    return table(["contender", *(f"batch {size}" for size in found)], body) if body else []


def middle(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def size_text(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def write(folder: Path, source: Path | None = None) -> None:
    """Writes ``report.md`` of the run in ``source``, by default the folder itself."""
    record = load(source or folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(markdown(record))


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        write(Path(arguments[-1]), Path(arguments[0]))
    except NotARun as error:
        print(f"serve_report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

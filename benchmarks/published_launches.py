"""What ``doctor`` says of launch lines that publishers print: ``python -m benchmarks.published_launches JUNIT.xml`` makes
docs/launches.md, and the table of all lines beside the record, of what ``pytest --nightly
tests/engine/test_published_launches.py --junitxml JUNIT.xml`` recorded, and of the record for lines that it did not run."""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "launches.md"
RECORD = ROOT / "benchmarks" / "results" / "launches" / "launches.json"
ALL = RECORD.with_suffix(".md")
PUBLISHED = ROOT / "benchmarks" / "published_launches.json"

HEAD = """# Published launch commands

What becomes of the launch lines that publishers print once `--expert-offload-num-resident` is added, with `auto` and with 16.
`sglang-uvm-offload doctor` judges each line over a stand-in for eight H200 (eight B200 where the line is for Blackwell) and 3
TiB of host RAM. Nothing here is a statement about a GPU.

Checkpoints have the published configuration and the names, types and sizes of the tensors, without their bytes. A model of
which no tensor names are known is launched with `--load-format dummy`. `--trust-remote-code` is left out. A line is not
judged where SGLang has no class for the model, or where its draft model is only on the Hub.

[All lines with their verdicts](../benchmarks/results/launches/launches.md). How `plan` counts the weights of these models is
in [a table of its own](../benchmarks/results/architectures/architectures.md). `benchmarks/published_launches.py` makes this
page of the results of `tests/engine/test_published_launches.py`.
"""

ALL_HEAD = """# All published launch lines

Made by `benchmarks/published_launches.py`; [docs/launches.md](../../../docs/launches.md) sums it up and says how lines are
judged.

| model | its line | residents | verdict |
| --- | --- | --- | --- |
"""

WARNED = ("estimated not to fit", "doubtful")
"""Verdicts of launches that start with a warning: the ranks decide, once they have built the model."""
SERVED = re.compile(r"served: (\d+) of (\d+) experts a layer resident(?:, (\d+) slots)?(?:; (.*))?")

Row = dict[str, str]


def read(junit: Path) -> list[Row]:
    """The verdicts that the tests recorded, of those that did not fail."""
    cases = [case for case in xml.parse(junit).iter("testcase") if case.find("failure") is None and case.find("error") is None]
    found = [{each.get("name", ""): each.get("value", "") for each in case.iter("property")} for case in cases]
    return [row for row in found if "verdict" in row]


def merged(kept: list[Row], made: list[Row]) -> list[Row]:
    """In the order of the published lines."""
    found = {(row["model"], row["words"], row["residents"]): row for row in (*kept, *made)}
    order = [(each["model"], each["words"]) for each in json.loads(PUBLISHED.read_text())]
    return [row for line in dict.fromkeys(order) for key, row in found.items() if key[:2] == line]


def page(rows: list[Row]) -> str:
    """docs/launches.md."""
    parts = [HEAD, _summary(rows), _served(rows)]
    parts += [_partial(rows), _by_reason("warned", rows), _by_reason("refused", rows)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def all_lines(rows: list[Row]) -> str:
    """The table of all lines."""
    sources = _sources()
    lines = ""
    for row in rows:
        link = f"[`{_words(row)}`]({sources[_line(row)]['source']})"
        lines += f"| {_model(row)} | {link} | {row['residents']} | {_cell(row['verdict'])} |\n"
    return ALL_HEAD + lines


def _summary(rows: list[Row]) -> str:
    launches = len({_line(row) for row in rows})
    counts = Counter(map(_kind, rows))
    return (
        f"{launches} of {len(_sources())} lines are judged. Of {len(rows)} launches {counts['served']} are served, "
        f"{counts['warned']} start with a warning and {counts['refused']} are refused."
    )


def _kind(row: Row) -> str:
    found = SERVED.fullmatch(row["verdict"])
    if found is not None:
        return "warned" if found[4] else "served"
    if not row["verdict"].startswith((*WARNED, "refused: ")):
        raise ValueError(f"no verdict: {row['verdict']}")
    return "warned" if row["verdict"].startswith(WARNED) else "refused"


def _served(rows: list[Row]) -> str:
    models = dict.fromkeys(row["model"] for row in rows if _kind(row) == "served")
    return f"## Served\n\nModels of which a line is served: {', '.join(sorted(models, key=str.lower))}."


def _partial(rows: list[Row]) -> str:
    """What ``auto`` offloads on these machines."""
    lines = []
    for row in rows:
        found = SERVED.fullmatch(row["verdict"])
        if found and not found[4] and row["residents"] == "auto" and found[1] != found[2]:
            lines.append(f"| {_model(row)} | `{_words(row)}` | {found[1]} of {found[2]} | {found[3] or 0} |")
    head = "## Offloaded by `auto`\n\nEvery other line that is served with `auto` keeps all experts in VRAM on these machines."
    return f"{head}\n\n| model | its line | residents of a layer | slots |\n| --- | --- | --- | --- |\n" + "\n".join(lines)


def _by_reason(kind: str, rows: list[Row]) -> str:
    """Many lines share a reason."""
    models: dict[str, dict[str, None]] = {}
    for row in rows:
        if _kind(row) == kind:
            models.setdefault(row["verdict"], {})[f"{_model(row)} ({row['residents']})"] = None
    lines = [f"| {_cell(verdict)} | {'; '.join(_joined(named))} |" for verdict, named in models.items()]
    return f"## {kind.capitalize()}\n\n| verdict | model (residents, if only so) |\n| --- | --- |\n" + "\n".join(lines)


def _joined(named: Iterable[str]) -> list[str]:
    """Without the residents of a model that has the verdict with either."""
    both = {name.removesuffix(" (auto)") for name in named if name.endswith(" (auto)")}
    both &= {name.removesuffix(" (16)") for name in named if name.endswith(" (16)")}
    return list(dict.fromkeys(model if (model := name.rpartition(" (")[0]) in both else name for name in named))


def _sources() -> dict[tuple[str, str], dict[str, str]]:
    return {(each["model"], each["words"]): each for each in json.loads(PUBLISHED.read_text())}


def _line(row: Row) -> tuple[str, str]:
    return row["model"], row["words"]


def _model(row: Row) -> str:
    gpu = _sources()[_line(row)].get("gpu")
    return f"{row['model']}, on {gpu}" if gpu else row["model"]


def _words(row: Row) -> str:
    return f"{_sources()[_line(row)].get('environment', '')} {row['words']}".strip()


def _cell(verdict: str) -> str:
    return verdict.replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=Path)
    rows = merged(json.loads(RECORD.read_text()) if RECORD.exists() else [], read(parser.parse_args(arguments).junit))
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    write(rows)
    return 0


def write(rows: list[Row]) -> None:
    PAGE.write_text(page(rows))
    ALL.write_text(all_lines(rows))


if __name__ == "__main__":
    raise SystemExit(main())

"""The page on faults, made of what ``scripts/faults.sh`` has tried: ``python benchmarks/reliability.py`` makes it again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "reliability" / "faults.json"
PAGE = HERE / "reliability.md"

GOOD = ("served on", "stopped with a reason", "ended by the signal")
DEFECTS = ("wrong answer", "hang", "leak", "no reason", "no restart")
HEAD = """# Faults

`scripts/faults.sh` breaks one thing at a time, without a GPU: each kind of CUDA call fails in each phase (the first, one in the
middle, the last; four errors), VRAM and host RAM run out, threads fail or hang, disks fill, clocks jump, processes are killed.
Ranks are this plugin's own objects over the stand-in CUDA driver or over emulated memory, with a small model whose every answer
depends on every byte of the experts that it uses. Servers are real SGLang servers of two ranks over emulated memory.

Every answer is compared, token by token, with that of the same traffic without faults (servers: without this plugin). Whoever
stops must say why, within its time; whoever serves on must end when asked, and leave no managed memory, no process and no
temporary file. The next start is tried on the files that are left.
"""

Outcomes = Sequence[dict[str, Any]]


def markdown(outcomes: Outcomes) -> str:
    tried = [each for each in outcomes if each["end"] != "not reached"]
    ends = Counter(each["end"] for each in tried)
    answers = sum(each["answers"] for each in tried)
    lines = [HEAD]
    lines.append(
        f"{len(tried)} faults struck, and {answers:,} answers were compared. {ends['served on']} times it served on, "
        f"{ends['stopped with a reason']} times it stopped\nwith a reason, {ends['ended by the signal']} times by a signal. "
        f"Wrong answers: {ends['wrong answer']}. Hangs: {ends['hang']}. Leaks: {ends['leak']}.\n"
        f"Stops without a reason: {ends['no reason']}. Failed restarts: {ends['no restart']}."
    )
    lines.append(f"{len(outcomes) - len(tried)} more were armed, and what they break was not used.\n")
    for title, key in (("kind", "kind"), ("phase", "phase")):
        lines.append(table(tried, title, key) + "\n")
    return "\n".join(lines).rstrip("\n") + "\n"


def table(outcomes: Outcomes, title: str, key: str) -> str:
    rows = [
        f"| in | {title} | faults | served on | stopped with a reason | ended by the signal | defects |",
        "| --- " * 7 + "|",
    ]
    for where, what in sorted({(each["where"], each[key]) for each in outcomes}):
        ends = Counter(each["end"] for each in outcomes if (each["where"], each[key]) == (where, what))
        counts = [sum(ends.values()), *(ends[end] for end in GOOD), sum(ends[end] for end in DEFECTS)]
        rows.append(f"| {where} | {what} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(rows)


def write(outcomes: Outcomes, out: Path | None = None) -> None:
    """Only the JSON, to ``out`` if that is given."""
    rows = sorted(outcomes, key=lambda each: (each["where"], each["kind"], each["phase"], each["what"]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    (out or RESULTS).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    if out is None:
        PAGE.write_text(markdown(rows))


if __name__ == "__main__":
    PAGE.write_text(markdown(json.loads(RESULTS.read_text())))

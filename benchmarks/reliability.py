"""Writes the page on faults, long runs and bad input from the results of ``scripts/faults.sh``, ``scripts/soak.sh`` and
``scripts/fuzz.sh``: ``python -m benchmarks.reliability``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "reliability" / "faults.json"
SOAK = RESULTS.with_name("soak.json")
FUZZ = RESULTS.with_name("fuzz.json")
PAGE = HERE / "reliability.md"

GOOD = ("served on", "stopped with a reason", "ended by the signal")
DEFECTS = ("wrong answer", "hang", "leak", "no reason", "no restart")
HEAD = """# Faults

`scripts/faults.sh` breaks one thing at a time, without a GPU: each kind of CUDA call fails in each phase (the first, one in the
middle, the last; four errors), VRAM and host RAM run out, threads fail or hang, disks fill, clocks jump, processes are killed.
Ranks are this plugin's own objects over the stand-in CUDA driver or over emulated memory, with a small model whose every answer
depends on every byte of the experts that it uses; with slots, only what slots add is tried. Engines are real SGLang engines
with default CUDA graphs over the stand-in driver; servers are real SGLang servers of two ranks over emulated memory.

Every answer is compared, token by token, with that of the same traffic without faults (servers: without this plugin). In an
engine, where SGLang's kernels compute nothing, the bytes of all experts, of their copies in slots and of those in stream
buffers are compared instead, after each step. Whoever stops must say why, within its time; whoever serves on must end when
asked, and leave no managed memory, no process and no temporary file. The next start is tried on the files that are left.
"""

SOAKED = """## Soak

`scripts/soak.sh` has four clients ask a server of two ranks, in domains that change, with `continuous`, saving and tracing;
an operator has it readvise, pause, resume and save. Every answer is compared with that of a server without this plugin.
The server lives several times, each time on the profile that the life before has saved: faults strike, end it or pass, and it
is started again. A request that its server's end leaves without an answer is interrupted; one that fails while its server
lives is failed.
"""
GREW = """The largest growth in a life of the medians from one half of its last two thirds to the other, over all processes
(rss: memory; shm: files of /dev/shm that they map):"""

FUZZED = """## Bad input

`scripts/fuzz.sh` damages what this plugin reads from outside: flags, files, models, statistics, addresses, labels, bodies of
requests. Every input must be accepted or refused with a documented error, in time, without a control character in the message;
and nothing may be unpickled, written elsewhere, started or connected to.
"""

Outcomes = Sequence[dict[str, Any]]


def markdown(outcomes: Outcomes, soak: dict[str, Any] | None = None, fuzz: dict[str, Any] | None = None) -> str:
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
    if soak is not None:
        lines.append(soaked(soak))
    if fuzz is not None:
        lines.append(fuzzed(fuzz))
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


def soaked(soak: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in soak["answers"].items())
    told = ", ".join(f"{action} {count}" for action, count in soak["actions"].items())
    trouble = sum(len(life["trouble"]) for life in soak["lives"])
    lines = [
        f"{sum(soak['answers'].values()):,} requests in {soak['minutes']:g} minutes: {kinds}.",
        f"Wrong answers: {len(soak['wrong'])}. Failed requests: {len(soak['failed'])}. Left behind: {len(soak['left'])}. "
        f"Trouble that no fault explains: {trouble}.",
        f"Told: {told}.\n",
        "| life | faults that struck | ended | requests | interrupted | promotions of rank 0 | hit rate | failed saves |",
        "| --- " * 8 + "|",
    ]
    for number, life in enumerate(soak["lives"], 1):
        faults = "<br>".join(life["faults"]) or "none"
        end = "by itself, with its reason" if life["died"] else "when asked"
        moves = f"{life['moves']:,}" + (", then ended" if life["moves_ended"] else "")
        counts = f"{life['requests']:,} | {life['interrupted']} | {moves} | {life['hit_rate']:.1%} | {life['failed_saves']}"
        lines.append(f"| {number} | {faults} | {end} | {counts} |")
    growths = [life["growth"] for life in soak["lives"] if life["growth"]]
    if growths:
        growth = ", ".join(f"{name} {max(each[name] for each in growths):+.1%}" for name in growths[0])
        lines.append(f"\n{GREW} {growth}.")
    return "\n".join([SOAKED, *lines]) + "\n"


def fuzzed(fuzz: dict[str, Any]) -> str:
    targets = fuzz["targets"]
    total = {name: sum(counts[name] for counts in targets.values()) for name in ("inputs", "tracebacks")}
    lines = [
        f"{total['inputs']:,} inputs, {total['tracebacks']} that failed.\n",
        "| target | inputs | refused | accepted | failed |",
        "| --- " * 5 + "|",
    ]
    for name, counts in targets.items():
        lines.append(f"| {name} | " + " | ".join(f"{count:,}" for count in counts.values()) + " |")
    return "\n".join([FUZZED, *lines]) + "\n"


def committed() -> str:
    """Makes the page from the committed results."""
    parts = [json.loads(path.read_text()) if path.exists() else None for path in (SOAK, FUZZ)]
    return markdown(json.loads(RESULTS.read_text()), *parts)


def write_page() -> None:
    PAGE.write_text(committed())


def write(outcomes: Outcomes, out: Path | None = None) -> None:
    """Writes the results and the page; with ``out``, only the results, to that file."""
    rows = sorted(outcomes, key=lambda each: (each["where"], each["kind"], each["phase"], each["what"]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    (out or RESULTS).write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    if out is None:
        write_page()


if __name__ == "__main__":
    write_page()

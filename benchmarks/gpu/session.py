"""Runs the sections of a GPU session: ``scripts/gpu_session.sh --help``.

Each part runs in its own process, so that a crash, a sticky CUDA error or a hang costs only that part. The section's JSON is
written after each part, and a later run resumes there. Whatever hangs, the session ends in time. This module does not import
torch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu import child
from benchmarks.gpu.environment import STAND_IN
from benchmarks.gpu.figures import lines_of
from benchmarks.gpu.goals import GOALS
from benchmarks.gpu.rows import Row, read_rows
from benchmarks.gpu.sections import SECTIONS, Part, Section, too_much

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 30
"""Extra time for a part to finish what it began before its limit."""
PATIENCE = 4
"""Factor on all limits where nothing is measured: no GPU is waiting, and the machine may be slow."""
CALL_SECONDS = 570
"""The default time of a call: some machines kill a command after ten minutes."""
ENVIRONMENT_SECONDS = 90
"""Time to import torch and start CUDA."""
WRITE_SECONDS = 5
"""Time to write a section's results."""
NOTHING_MEASURED = "NOT MEASUREMENTS: no kernel computes here (a stand-in driver), so no figure below says anything of a GPU"

DONE, FAILED, CUT_SHORT, LEFT, TOO_LARGE = "done", "failed", "cut short", "no time left", "too large for this machine"


class SectionFailure(Exception):
    """The section could not start, or is not complete. The message gives the reason."""


@dataclass
class Call:
    """The time budget of one call of this program."""

    seconds: float
    patience: int = PATIENCE if STAND_IN else 1
    started: float = field(default_factory=lambda: time.monotonic())

    def left(self) -> float:
        """Seconds that a process may still run, with time reserved to kill it."""
        spent = time.monotonic() - self.started
        return self.seconds * self.patience - spent - child.KILL_SECONDS - WRITE_SECONDS


def main(arguments: Sequence[str]) -> int:
    wanted = parse(arguments)
    if wanted.list:
        list_sections()
        return 0
    named = [name.partition(":")[::2] for name in wanted.sections or SECTIONS]
    if wanted.dry_run:
        return dry_run([SECTIONS[name] for name in dict.fromkeys(name for name, _ in named)])
    failures = []
    call = Call(wanted.seconds)
    parts: dict[str, set[str]] = {}
    for name, part in named:
        parts.setdefault(name, set()).update({part} if part else {each.name for each in SECTIONS[name].parts})
    for name, names in parts.items():
        section = SECTIONS[name]
        try:
            run_section(section, names, wanted, call)
        except SectionFailure as failure:
            failures.append(f"section {section.name}: {failure}")
            print(failures[-1], flush=True)
    for message in failures:
        print(f"gpu_session: {message}", file=sys.stderr)
    return 1 if failures else 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_session.sh",
        description="Measures unified memory on this machine's GPU, section by section (default: all, in order). "
        "Results: a JSON and a log per section in --out, else $OUT, else benchmarks/results/DATE-DEVICE.",
    )
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION[:PART]", help=f"{', '.join(SECTIONS)}; with :PART, one part of it"
    )
    parser.add_argument("--list", action="store_true", help="list sections and parts in order, with their times")
    parser.add_argument("--dry-run", action="store_true", help="do everything up to the first CUDA call")
    parser.add_argument("--out", type=Path, help="folder for results, relative to the repository's root")
    parser.add_argument("--again", action="store_true", help="ignore earlier results and measure everything again")
    parser.add_argument("--once", action="store_true", help="skip parts that failed before, too")
    parser.add_argument(
        "--seconds",
        type=float,
        default=CALL_SECONDS,
        help="stop within this time; the next call resumes with what is left (default %(default)s)",
    )
    wanted = parser.parse_args(arguments)
    if wanted.seconds <= 0:
        parser.error(f"--seconds {wanted.seconds:g}: must be more than 0")
    known = {name: [part.name for part in section.parts] for name, section in SECTIONS.items()}
    for section, colon, part in (word.partition(":") for word in wanted.sections):
        if section not in known:
            parser.error(f"no section {section}: there are {', '.join(known)}")
        if colon and part not in known[section]:
            parser.error(f"no part {part!r} of section {section}: there are {', '.join(known[section])}")
    return wanted


def list_sections() -> None:
    for section in SECTIONS.values():
        print(f"{section.name}: {section.question}; about {section.expected / 60:.1f} minutes")
        for part in section.parts:
            print(f"    {part.name:14}{part.expected:4} s  {part.managed_gib:5.1f} GiB managed  {part.decides}")


# ---- one section ----


def run_section(section: Section, names: set[str], wanted: argparse.Namespace, call: Call) -> None:
    """Runs the parts ``names`` of the section, except those that an earlier record has as done or, with ``--once``, failed."""
    environment = describe_machine(call)
    out = wanted.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else default_folder(environment))
    out.mkdir(parents=True, exist_ok=True)
    record = None if wanted.again else earlier_record(out / f"{section.name}.json", environment)
    if record and record["complete"]:
        print(f"section {section.name}: complete in {out}, not run again (use --again to repeat it)", flush=True)
        return
    small = not environment["measured"]
    call.patience = PATIENCE if small else 1
    room = environment["vram_free_bytes"], environment["host_available_bytes"]
    refused = {part.name: "; ".join(too_much(part, *room, small)) for part in section.parts}
    if all(refused.values()):
        raise SectionFailure("not started: " + "; ".join(refused.values()))
    record = record or {"section": section.name, "question": section.question, "parts": {}}
    record |= {"measured": environment["measured"], "environment": environment, "complete": False}
    record.setdefault("commands", []).append([sys.executable, *sys.argv])
    record.setdefault("started", []).append(datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    with (out / f"{section.name}.log").open("a") as log:
        where = f"{environment['device']}, driver {environment['driver']}"
        say(log, f"== section {section.name} on {where}, {record['started'][-1]}")
        say(log, "code: " + ", ".join(f"{name} {digest}" for name, digest in environment["code"].items()))
        ended = (DONE, FAILED) if wanted.once else (DONE,)
        for part in section.parts:
            if part.name not in names or record["parts"].get(part.name, {}).get("status") in ended:
                continue
            if refused[part.name]:
                say(log, f"-- not started: {refused[part.name]}")
                record["parts"][part.name] = {"status": TOO_LARGE, "error": refused[part.name], "rows": []}
            else:
                found = run_part(part, call.left() - GRACE_SECONDS, small, log)
                if found["status"] != LEFT or part.name not in record["parts"]:  # else its earlier rows are kept
                    record["parts"][part.name] = found
            judge(section, record)
            write_json(out / f"{section.name}.json", record)
        for text in table(section, record):
            say(log, text)
    states = {name: part["status"] for name, part in record["parts"].items() if name in names}
    reasons = [f"{name}: {state}" for name, state in states.items() if state != DONE]
    if reasons:
        raise SectionFailure("; ".join(reasons) + f" (see {out / f'{section.name}.log'})")


def run_part(part: Part, left: float, small: bool, log: TextIO) -> dict[str, Any]:
    """Runs a part for at most ``left`` seconds, kills it GRACE_SECONDS later, and returns its entry in the section's record."""
    started = time.monotonic()
    if left < min(part.expected, part.limit):
        say(log, f"-- {part.name}: no time left ({left:.0f} s)")
        return {"status": LEFT, "rows": []}
    seconds = max(0, min(part.limit * (PATIENCE if small else 1), left))
    with tempfile.TemporaryDirectory() as folder:
        rows_file = Path(folder) / "rows"
        words = [part.name, str(rows_file), f"{seconds:.0f}", *(["--small"] if small else [])]
        command = [*program(part.program), *words]
        say(log, f"-- {part.name}: {part.decides}; at most {seconds:.0f} s")
        ended = child.run(command, seconds + GRACE_SECONDS, log, log)
        rows = read_rows(rows_file)
    error = error_of(ended, seconds)
    finished = any(row["row"] == "finished" and row["values"] == [1] for row in rows)
    status = FAILED if error else DONE if finished else CUT_SHORT
    if error:
        say(log, f"-- {part.name} {error}")
    taken = time.monotonic() - started
    say(log, f"-- {part.name}: {status}, {len(rows)} rows, {taken:.1f} s")
    return {"status": status, "error": error, "seconds": round(taken, 2), "command": command, "rows": rows}


def error_of(ended: child.Ended, seconds: float) -> str | None:
    if ended.status is None:
        stuck = ", and did not end: it is stuck in the driver" if ended.stuck else ""
        return f"killed after {seconds + GRACE_SECONDS:.0f} s{stuck}"
    if ended.stuck:
        return f"ended with status {ended.status}, and left processes that are stuck in the driver"
    return None if ended.status == 0 else f"ended with status {ended.status}"


def judge(section: Section, record: dict[str, Any]) -> None:
    parts = record["parts"]
    rows: dict[str, list[Row]] = {name: part["rows"] for name, part in parts.items()}
    record["goals"] = [goal.judge(rows, record["measured"]) for goal in GOALS.get(section.name, ())]
    record["complete"] = all(parts.get(part.name, {}).get("status") == DONE for part in section.parts)


def table(section: Section, record: dict[str, Any]) -> list[str]:
    lines = [f"== {section.name}: {section.question}"]
    if not record["measured"]:
        lines.append(NOTHING_MEASURED)
    for part in section.parts:
        if part.name in record["parts"]:
            figures = lines_of(record["parts"][part.name]["rows"])
            lines += [f"{part.name}: {part.decides}", *(f"    {figure}" for figure in figures)]
    for goal in record["goals"]:
        verdict = {True: "met", False: "MISSED", None: "not judged"}[goal["met"]]
        ratio = "no figure" if goal["ratio"] is None else f"{goal['ratio']:.4g}"
        lines.append(f"goal: {goal['goal']}: {ratio} (wanted {goal['limit']}): {verdict}")
        if goal["from"]:
            lines.append(f"    {goal['from']}")
    states = ", ".join(f"{name} {part['status']}" for name, part in record["parts"].items())
    lines.append(f"== {section.name}: {'complete' if record['complete'] else 'NOT complete'}: {states}")
    return lines


def earlier_record(path: Path, environment: dict[str, Any]) -> dict[str, Any] | None:
    """Returns an earlier record that this run may resume, else None. A section never mixes figures of different machines,
    drivers, libraries or code (``shown_code``), nor figures of a stand-in with a GPU's."""
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    same = ("device", "driver", "cuda_of_torch", "torch", "code", "measured")
    other = [name for name in same if record["environment"].get(name) != environment[name]]
    if other:
        print(f"{path} has another {', '.join(other)}: measuring again", flush=True)
    return None if other else record


# ---- the dry run ----


def dry_run(sections: Sequence[Section]) -> int:
    """Compiles and checks everything that needs no GPU. Programs run with no CUDA device visible."""
    command = [*program("dry_run"), *{part.program: None for section in sections for part in section.parts}]
    print(f"== {' '.join(command)}", flush=True)
    failed = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}).returncode != 0
    for section in sections:
        needs = f"{section.managed_gib:g} GiB of managed memory, {section.host_gib:g} GiB of host RAM"
        print(f"{section.name}: {needs} at most; free VRAM needed: more than {3 * section.managed_gib:g} GiB")
    if failed:
        print("gpu_session: the dry run failed", file=sys.stderr)
    return int(failed)


# ---- small things ----


def program(name: str) -> list[str]:
    """Returns the command that runs a program of this folder from the root of the repository."""
    return [sys.executable, "-m", f"benchmarks.gpu.{name}"]


def say(log: TextIO, text: str) -> None:
    """Writes to the log and to stdout."""
    print(text, flush=True)
    print(text, file=log, flush=True)


def describe_machine(call: Call) -> dict[str, Any]:
    """Describes the machine in a separate process, which starts CUDA."""
    if call.left() <= 0:
        raise SectionFailure("not started: no time left in this call")
    seconds = min(ENVIRONMENT_SECONDS * call.patience, call.left())
    try:
        printed = child.output(program("environment"), seconds)
    except child.ChildFailure as failure:
        raise SectionFailure(f"not started: the environment cannot be described: environment.py {failure}") from None
    described: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return described


def default_folder(environment: dict[str, Any]) -> Path:
    device = re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")
    played = "" if environment["measured"] else "-stand-in"
    return ROOT / "benchmarks" / "results" / f"{datetime.date.today().isoformat()}-{device}{played}"


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Writes one row per line, so that results diff as text. Replaces the old file only once the new one is complete."""
    shown = {**record, "parts": {}}
    text = json.dumps(shown, indent=1)
    parts = []
    for name, part in record["parts"].items():
        rows = ",\n".join("    " + json.dumps(row) for row in part["rows"])
        head = json.dumps({key: value for key, value in part.items() if key != "rows"})
        parts.append(f'  {json.dumps(name)}: {head[:-1]}, "rows": [\n{rows}\n  ]}}')
    text = text.replace('"parts": {}', '"parts": {\n' + ",\n".join(parts) + "\n }", 1)
    part_file = path.with_suffix(".json.part")
    part_file.write_text(text + "\n")
    os.replace(part_file, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""GPU_STATUS.md: every claim about CUDA has a state, and what it calls proven or refuted is in a log that is a measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.gpu import shown_code
from benchmarks.gpu.sections import SECTIONS

ROOT = Path(__file__).resolve().parents[2]
STATES = {"proven", "refuted", "read in source", "never run"}
CHANGED = ", code changed since"
COLUMNS = ["claim", "said in", "code", "state", "decided by", "evidence"]


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, the head first, without the line of dashes."""
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def parts() -> set[str]:
    """Such as "probe bandwidth"."""
    return {f"{section.name} {part.name}" for section in SECTIONS.values() for part in section.parts}


def called(script: str) -> set[str]:
    """The parts that it names, such as "ops contract" by ``ops:contract``, and all parts of a section that it names alone."""
    lines = [line.partition(" #")[0] for line in script.splitlines() if re.search(r"^(\w.*)?(measure \. |beside )", line)]
    named = [word.partition(":")[::2] for line in lines for word in re.split(r"measure \. |beside ", line)[1].split()]
    return {
        part
        for section, one in named
        for part in parts()
        if part == f"{section} {one}" or (not one and part.startswith(f"{section} "))
    }


def problems(text: str, root: Path) -> list[str]:
    """Everything that is wrong with a status file whose links are relative to ``root``."""
    head, *lines = table(text, "Claims")
    now = shown_code.digests()
    found = [] if head == COLUMNS else [f"the columns are {head}"]
    for cells in lines:
        if len(cells) != len(COLUMNS):
            found.append(f"{len(cells)} cells: {' | '.join(cells)}")
            continue
        claim, said_in, code, state, decided_by, evidence = cells
        names = [] if code == "none" else code.split(", ")
        marked, state = state.endswith(CHANGED), state.removesuffix(CHANGED)
        if state not in STATES:
            found.append(f"no state {state!r}: {claim}")
        if unknown := [name for name in names if name not in now]:
            found.append(f"no code {', '.join(unknown)!r}: {claim}")
        elif marked != any(shown_code.has_changed(names, log, now) for log in newest(evidence, root) if names):
            found.append(
                f"{code}: {'marked as changed, and has not' if marked else f'has changed, and no {CHANGED!r}'}: {claim}"
            )
        found += [f"no file {name}: {claim}" for name in said_in.split(", ") if not (ROOT / name).is_file()]
        known = parts() | ({"nothing yet"} if state in ("never run", "read in source") else {"its log"})
        found += [f"no part {name!r}: {claim}" for name in decided_by.split("; ") if name not in known]
        if state in ("proven", "refuted"):
            found += [f"{problem}: {claim}" for problem in evidence_problems(evidence, state, root)]
        elif state == "read in source":
            if not re.fullmatch(r"`uvm_\w+\.c`: `\w+`(; `uvm_\w+\.c`: `\w+`)*", evidence):
                found.append(f"no file and function: {claim}")
        elif evidence:
            found.append(f"evidence without a verdict: {claim}")
    return found


def newest(evidence: str, root: Path) -> list[Path]:
    """The JSON of the logs of the last day: they show what the code does now, or nothing does."""
    links = re.findall(r"\]\(([^)]+)\)", evidence)
    days = {link: re.findall(r"\d{4}-\d{2}-\d{2}|$", link)[0] for link in links}
    records = [(root / link).with_suffix(".json") for link, day in days.items() if day == max(days.values())]
    return [record for record in records if record.is_file()]


def evidence_problems(evidence: str, state: str, root: Path) -> list[str]:
    figures = re.findall(r"`([^`]+)`", evidence)
    links = re.findall(r"\]\(([^)]+)\)", evidence)
    found = []
    if not figures:
        found.append("no figure in backticks")
    if not links:
        found.append("no log")
    if not re.search(r"\b\d{4}-\d{2}-\d{2}\b", evidence):
        found.append("no date")
    if state == "refuted" and "changed:" not in evidence:
        found.append('no "changed:"')
    logs = [root / link for link in links]
    found += [f"missing log {log.name}" for log in logs if not log.is_file()]
    there = [log for log in logs if log.is_file()]
    text = "\n".join(log.read_text() for log in there)
    found += [f"no log holds {figure!r}" for figure in figures if figure not in text]
    for log in there:
        record = log.with_suffix(".json")
        if not record.is_file() or json.loads(record.read_text()).get("measured") is not True:
            found.append(f"{log.name} is not a log of a measurement")
    return found


STATUS = (ROOT / "GPU_STATUS.md").read_text()


def test_every_line_holds():
    assert problems(STATUS, ROOT) == []


def test_the_sources_that_compile_are_there():
    head, *lines = table(STATUS, "Compiled without a GPU")
    assert head == ["source", "compiler", "target", "tested by"]
    assert all((ROOT / name).is_file() for source, _, _, tested_by in lines for name in (source, tested_by))


def test_the_next_call_measures_all_that_was_never_run():
    """By one of the parts that decide a line, or by all where it says so."""
    planned = called((ROOT / "scripts/gpu_call.sh").read_text())
    assert planned <= parts()
    for claim, _, _, state, decided_by, _ in table(STATUS, "Claims")[1:]:
        if state == "never run" and decided_by != "nothing yet":
            assert planned & {*decided_by.split("; ")}, claim


DONE = "run|ran|compared|timed|served|measured"
STATE_WORDS = re.compile(rf"\b(proven|never ({DONE})|(nobody|no GPU) has ({DONE})|no log (yet|has|does|shows))\b", re.I)


def text_of(path: Path) -> str:
    """In one line, without the signs of comments."""
    return " ".join(re.sub(r"^\s*(#|//)", "", path.read_text(), flags=re.M).split())


def test_no_other_page_or_source_says_what_a_gpu_has_shown():
    """It would be told twice, and one of the two goes stale."""
    pages = [page for page in ROOT.glob("*.md") if page.name not in ("GPU_STATUS.md", "CHANGELOG.md")]
    found = [(ROOT / "docs").rglob("*.md"), (ROOT / "sglang_uvm_offload").rglob("*.py"), (ROOT / "kernels").glob("*.cu")]
    said = {path: STATE_WORDS.findall(text_of(path)) for paths in (pages, *found) for path in paths}
    assert {path.relative_to(ROOT): words for path, words in said.items() if words} == {}


def one_line(state: str, evidence: str = "", decided_by: str = "ops moves", code: str = "none") -> str:
    row = f"| pages move | README.md | {code} | {state} | {decided_by} | {evidence} |"
    return f"\n## Claims\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n{row}\n\n## Compiled without a GPU\n"


@pytest.fixture
def results(tmp_path) -> Path:
    code = shown_code.digests()
    of = {"real": code, "older": {**code, "slots": "0"}, "played": code, "2026-12-02": code}
    for name, digests in of.items():
        (tmp_path / f"{name}.log").write_text("promotion over the copy engine: 0.85 (wanted >= 0.8): met\n")
        record = {"measured": name != "played", "environment": {"commit": "0", "code": digests}}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    return tmp_path


GOOD = "`0.85` in [the log](real.log), 2026-12-01"
OLDER = GOOD.replace("real.log", "older.log")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (one_line("never run"), None),
        (one_line("proven", GOOD), None),
        (one_line("refuted", GOOD + "; changed: nothing moves"), None),
        (one_line("refuted", GOOD), 'no "changed:"'),
        (one_line("likely"), "no state 'likely'"),
        (one_line("never run", GOOD), "evidence without a verdict"),
        (one_line("never run", decided_by="probe nothing"), "no part 'probe nothing'"),
        (one_line("proven", GOOD, decided_by="its log"), None),
        (one_line("never run", decided_by="its log"), "no part 'its log'"),
        (one_line("proven"), "no figure in backticks"),
        (one_line("proven", GOOD.replace("0.85", "0.95")), "no log holds '0.95'"),
        (one_line("proven", GOOD.replace("real.log", "lost.log")), "missing log lost.log"),
        (one_line("proven", GOOD.replace("real.log", "played.log")), "played.log is not a log of a measurement"),
        (one_line("proven", GOOD.replace(", 2026-12-01", "")), "no date"),
        (one_line("proven", OLDER, code="copies"), None),
        (one_line("proven", OLDER, code="copies, slots"), "has changed"),
        (one_line("proven, code changed since", OLDER, code="copies, slots"), None),
        (one_line("proven, code changed since", GOOD, code="slots"), "marked as changed, and has not"),
        (one_line("proven", f"{OLDER}, [again](2026-12-02.log)", code="slots"), None),
        (one_line("never run", code="slits"), "no code 'slits'"),
    ],
)
def test_a_line_is_believed_only_with_its_log(results, text, wrong):
    found = problems(text, results)
    assert found == [] if wrong is None else any(wrong in problem for problem in found), found

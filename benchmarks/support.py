"""The table of what is served and what is refused, made of what became of the tests: ``python -m benchmarks.support`` after
``scripts/support.sh`` has run them. It writes docs/support.md, and the full table beside the record of the results."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "support"
TESTS, GPU, VERSIONS = RESULTS / "support.json", RESULTS / "gpu.json", RESULTS / "versions.json"
PAGE = ROOT / "docs" / "support.md"
FULL = RESULTS / "support.md"

GROUPS = ("Launch", "Requests", "Speculation", "Architecture", "Format", "Parallel", "Live change")
REASON = 300
"""Characters of a message that the table shows."""
SGLANG_FAILS = "SGLang fails"
STATUS = {"works": "works", "refused": "refused", "sglang_fails": SGLANG_FAILS}
"""The status of a row whose tests passed, by their marker."""
STATUSES = (*STATUS.values(), "not tried", "broken")
STANDIN, SERVED, NO_SERVER = "stand-in driver", "served on a CPU", "SGLang's code, no server"
SHORT = {SERVED: "Server on a CPU", STANDIN: "Stand-in driver", NO_SERVER: "No server"}
"""What shows that something works, the strongest first, and the page's word for it."""
LAUNCHED = "test_architecture_launches.py"
"""The tests by which ``doctor`` judges a launch of each architecture."""

HEAD = """# What is supported

The test suite makes this page: `scripts/support.sh` runs it, and `python -m benchmarks.support` writes what was found. [The
full table](../benchmarks/results/support/support.md) names the tests behind each row.

- **Works**: every test of it has passed. Where a server answers, its tokens and log-probabilities are those of the same
  server without offloading.
- **Refused**: a test has seen the launch end with this reason before anything loads.
- **SGLang fails**: SGLang cannot do it without this plugin either. These rows are counted apart.

What works was shown by one of three: a *server on a CPU* (a real SGLang server or engine over emulated unified memory), the
*stand-in driver* (SGLang's GPU code with its graphs, over a driver that computes nothing and notes every call), or *no
server* (SGLang's own layers, loaders, kernels in an interpreter, or argument checks). An architecture without a server is
built small, with all of its experts in managed memory, to the byte.
"""

FULL_HEAD = """# What is supported: all rows

`python -m benchmarks.support` makes this table; [docs/support.md](../../../docs/support.md) sums it up and explains its
words. *A launch* of an architecture, with `auto` and with a number, is judged by `doctor` over the stand-in driver.
"""

VERSIONS_HEAD = """The rows above are of the versions named at the top. `scripts/try_sglang.sh VERSION` runs the tests that
start SGLang with another one, in an environment of its own. The full table names what they skip."""


@dataclass(frozen=True)
class Row:
    """One thing that users have in their launch. ``status``: one of ``STATUSES``."""

    group: str
    what: str
    status: str
    reason: str
    evidence: str
    tests: tuple[str, ...]
    gpu: str | None
    """A log that shows it on a GPU, from the repository's root; None without one."""


def table(found: Iterable[dict[str, Any]], proofs: Iterable[dict[str, str]] = ()) -> list[Row]:
    """The rows, in order, of the results of single tests. Raises ``ValueError`` for what is both served and refused."""
    logs = {(proof["group"], proof["what"]): proof["log"] for proof in proofs}
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in found:
        by_name.setdefault((each["group"], each["what"]), []).append(each)
    if unknown := [f"{group}: {what}" for group, what in by_name if group not in GROUPS]:
        raise ValueError(f"of no group {GROUPS}: {unknown}")
    if untested := logs.keys() - by_name.keys():
        raise ValueError(f"logs of what is in no test: {sorted(untested)}")
    rows = [_row(*name, results, logs.get(name)) for name, results in by_name.items()]
    return sorted(rows, key=lambda row: (GROUPS.index(row.group), row.status != "works", row.what.lower()))


def _row(group: str, what: str, results: list[dict[str, Any]], log: str | None) -> Row:
    kinds = {each["kind"] for each in results}
    if len(kinds) > 1:
        raise ValueError(f"{group}: {what}: tests have different markers: {', '.join(sorted(kinds))}")
    outcomes = Counter(each["outcome"] for each in results)
    status = "broken" if outcomes["failed"] else STATUS[kinds.pop()] if outcomes["passed"] else "not tried"
    reasons = [each["reason"] for each in results if each["reason"] and each["outcome"] != "failed"]
    evidence = " and ".join(sorted({shown_with(each["test"]) for each in results if each["outcome"] != "skipped"}))
    tests = sorted({each["test"].partition("[")[0] for each in results})
    return Row(group, what, status, reasons[0] if reasons and status != "works" else "", evidence, tuple(tests), log)


def shown_with(test: str) -> str:
    """What a test shows it with, by its file."""
    name = test.partition("::")[0].rpartition("/")[2]
    if name.startswith("test_cuda_"):
        return STANDIN
    return SERVED if name.startswith("test_serving") else NO_SERVER


def page(record: dict[str, Any], rows: list[Row], versions: Sequence[dict[str, Any]] = ()) -> str:
    """docs/support.md."""
    parts = [HEAD, f"{_made_by(record)} {summary_line(rows)}", "\n".join(_counts(rows)), _on_a_gpu(rows), "## What works"]
    parts += [_names(group, rows) for group in GROUPS]
    parts += ["## What is refused or fails", "\n".join(_not_working(rows))]
    if versions:
        parts += ["## SGLang versions", VERSIONS_HEAD, "\n".join(_versions(versions))]
    return _joined(parts)


def full(record: dict[str, Any], rows: list[Row], versions: Sequence[dict[str, Any]] = ()) -> str:
    """The table of all rows, and what other versions skip."""
    parts = [FULL_HEAD, _made_by(record)]
    for group in GROUPS:
        mine = [row for row in rows if row.group == group]
        if mine:
            parts += [f"## {group}", "\n".join(_lines(mine, launches=group == "Architecture"))]
    return _joined([*parts, *_skipped(versions)])


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _made_by(record: dict[str, Any]) -> str:
    made_by = sorted({f"SGLang {row['sglang']}, torch {row['torch']}, Python {row['python']}" for row in record["rows"]})
    return f"With {'; '.join(made_by)}."


def _on_a_gpu(rows: Iterable[Row]) -> str:
    seen = [f"{row.what} ([log](../{row.gpu}))" for row in rows if row.gpu is not None]
    return f"On a GPU: {'; '.join(seen)}. No other row has a log of a GPU yet." if seen else "No row has a log of a GPU yet."


def _counts(rows: Iterable[Row]) -> Iterable[str]:
    """By group, and by the strongest of what has shown it."""
    columns = [*SHORT.values(), *(status for status in STATUSES if status != "works")]
    counts = Counter((row.group, _shown(row) if row.status == "works" else row.status) for row in rows)
    used = [column for column in columns if any(counts[group, column] for group in GROUPS)]
    yield f"| | {' | '.join(f'works: {each}' if each in SHORT.values() else each for each in used)} |"
    yield f"| --- {'| --- ' * len(used)}|"
    for group in GROUPS:
        if any(counts[group, column] for column in used):
            yield f"| {group} | {' | '.join(str(counts[group, column]) for column in used)} |"


def _shown(row: Row) -> str:
    return next(short for evidence, short in SHORT.items() if evidence in row.evidence)


def _names(group: str, rows: Iterable[Row]) -> str:
    """What works, by the strongest of what has shown it."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.group == group and row.status == "works":
            names.setdefault(_shown(row), []).append(row.what)
    lists = [f"*{short}:* {'; '.join(_compact(names[short]))}." for short in SHORT.values() if short in names]
    return "\n\n".join([f"### {group}", *lists]) if lists else ""


def _compact(names: Iterable[str]) -> list[str]:
    """Names that differ in their last parentheses alone as one, and flags as code."""
    found: dict[str, list[str]] = {}
    for name in names:
        head, among, tail = name.removesuffix(")").rpartition(" (") if name.endswith(")") else (name, "", "")
        found.setdefault(head, []).extend([tail] if among else [])
    joined = [f"{head} ({', '.join(tails)})" if tails else head for head, tails in found.items()]
    return [_code(name) for name in joined]


def _code(name: str) -> str:
    return re.sub(r"(?<![\w-])(--\w[\w-]*|SGLANG_[\w=]+)", r"`\1`", name)


def _not_working(rows: Iterable[Row]) -> Iterable[str]:
    """By reason, because several rows may share one."""
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "works":
            names.setdefault((row.group, row.status, row.reason.removeprefix(f"{row.what}: ")), []).append(row.what)
    yield "| | what | |"
    yield "| --- | --- | --- |"
    for (group, status, reason), what in names.items():
        yield f"| {group} | {', '.join(map(_code, what))} | {status}{f': {_cell(reason)}' if reason else ''} |"


def _lines(rows: list[Row], launches: bool = False) -> Iterable[str]:
    """``launches``: with a column of whether ``doctor`` has judged a launch of it."""
    columns = [*(["a launch"] if launches else []), "shown by", "with"]
    yield f"| | | {' | '.join(columns)} |"
    yield f"| --- | --- {'| --- ' * len(columns)}|"
    for row in rows:
        names = ", ".join(f"[{test.rpartition('::')[2]}](../../../{test.partition('::')[0]})" for test in row.tests)
        status = f"{row.status}: {_cell(row.reason)}" if row.reason else row.status
        judged = " judged |" if any(LAUNCHED in test for test in row.tests) else " |"
        yield f"| {row.what} | {status} |{judged if launches else ''} {names} | {row.evidence} |"


def _versions(entries: Iterable[dict[str, Any]]) -> Iterable[str]:
    yield "| SGLang | torch | Python | passed | failed | skipped | tests that ran |"
    yield "| --- " * 7 + "|"
    for each in entries:
        counts = " | ".join(str(each[kind]) for kind in ("passed", "failed", "skipped"))
        yield f"| {each['sglang']} | {each['torch']} | {each['python']} | {counts} | {', '.join(map(_short, each['ran']))} |"


def _skipped(entries: Iterable[dict[str, Any]]) -> Iterable[str]:
    for each in entries:
        lines = [f"- {_cell(reason)} ({count})" for reason, count in each["skipped_as"].items()]
        if lines:
            yield "\n".join([f"Skipped with {each['sglang']}:\n", *lines])


def _short(path: str) -> str:
    return path.partition("/")[2]


def _cell(reason: str) -> str:
    words = " ".join(reason.split()).replace("|", "\\|")
    return words if len(words) <= REASON else words[: REASON - 4].rstrip() + " ..."


def summary_line(rows: list[Row]) -> str:
    counts = Counter(row.status for row in rows)
    named = ", ".join(f"{counts[status]} {status}" for status in ("refused", "not tried", "broken") if counts[status])
    apart = sum(row.status == "works" and row.evidence == NO_SERVER for row in rows)
    seen = f", {apart} of them shown without a server" if apart else ""
    possible = len(rows) - counts[SGLANG_FAILS]
    share = 100 * counts["works"] / possible
    beside = f" SGLang itself fails at {counts[SGLANG_FAILS]} more." if counts[SGLANG_FAILS] else ""
    return f"{counts['works']} of {possible} rows work ({share:.0f}%){seen}; {named or 'none is refused'}.{beside}"


def committed() -> tuple[str, str, list[Row]]:
    """The page and the full table of the committed results, and their rows."""
    record, versions = json.loads(TESTS.read_text()), json.loads(VERSIONS.read_text())
    rows = table(record["rows"], json.loads(GPU.read_text()))
    return page(record, rows, versions), full(record, rows, versions), rows


def main() -> None:
    made, table_of_all, rows = committed()
    PAGE.write_text(made)
    FULL.write_text(table_of_all)
    print(summary_line(rows))


if __name__ == "__main__":
    main()

"""The table of what is served and what is refused, made of what became of the tests: ``python -m benchmarks.support`` after
``scripts/support.sh`` has run them. It writes docs/support.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "support"
TESTS, GPU, VERSIONS = RESULTS / "support.json", RESULTS / "gpu.json", RESULTS / "versions.json"
PAGE = ROOT / "docs" / "support.md"

GROUPS = ("Launch", "Requests", "Speculation", "Architecture", "Format", "Parallel", "Live change")
REASON = 300
"""Characters of a message that the table shows."""
SGLANG_FAILS = "SGLang fails"
STATUS = {"works": "works", "refused": "refused", "sglang_fails": SGLANG_FAILS}
"""Of a row whose tests have passed, by their marker."""
STANDIN, SERVED, NO_SERVER = "stand-in driver", "served on a CPU", "SGLang's code, no server"
LAUNCHED = "test_architecture_launches.py"
"""The tests by which ``doctor`` judges a launch of each architecture."""

HEAD = """# What is served, and what is refused

Generated from the test suite: `scripts/support.sh` runs it, and `python -m benchmarks.support` makes this page. A row
*works* if every test named in it has passed, with the tokens and log-probabilities of the same server without offloading
wherever a server answers; it is *refused* if a test has seen the launch end before anything loads, with that reason; it is
*broken* if a test failed. Where *SGLang fails*, a test has seen that this SGLang cannot do it without this plugin either, with
that error; these rows are counted apart.

*Served on a CPU*: a real SGLang server or engine over emulated unified memory. *Stand-in driver*: SGLang's GPU code with its
graphs over a driver that computes nothing and notes every call.
*SGLang's code, no server*: its own layers, loaders, kernels in an interpreter, or argument checks; an architecture is built so,
small, and all of its experts are in managed memory, to the byte. *A launch* of it, with `auto` and with a number, is judged
by `doctor` over the stand-in driver.
"""

VERSIONS_HEAD = """The rows above are of the versions named at the top. `scripts/try_sglang.sh VERSION` runs the tests that
start SGLang with another one, in an environment of its own. What they skip, and why, is below the table."""


@dataclass(frozen=True)
class Row:
    """One thing that users have in their launch. ``status``: one of ``STATUS``, not tried or broken."""

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
    made_by = sorted({f"SGLang {row['sglang']}, torch {row['torch']}, Python {row['python']}" for row in record["rows"]})
    head = f"By {'; '.join(made_by)}. {summary_line(rows)}"
    parts = [HEAD, head, _on_a_gpu(rows)]
    for group in GROUPS:
        mine = [row for row in rows if row.group == group]
        if mine:
            parts += [f"## {group}", "\n".join(_lines(mine, launches=group == "Architecture"))]
    if versions:
        parts += ["## SGLang versions", VERSIONS_HEAD, "\n".join(_versions(versions)), *_skipped(versions)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _on_a_gpu(rows: Iterable[Row]) -> str:
    seen = [f"{row.what} ([log](../{row.gpu}))" for row in rows if row.gpu is not None]
    return f"On a GPU: {'; '.join(seen)}. No other row has a log of a GPU yet." if seen else "No row has a log of a GPU yet."


def _lines(rows: list[Row], launches: bool = False) -> Iterable[str]:
    """``launches``: with a column of whether ``doctor`` has judged a launch of it."""
    columns = [*(["a launch"] if launches else []), "shown by", "with"]
    yield f"| | | {' | '.join(columns)} |"
    yield f"| --- | --- {'| --- ' * len(columns)}|"
    for row in rows:
        names = ", ".join(f"[{test.rpartition('::')[2]}](../{test.partition('::')[0]})" for test in row.tests)
        status = f"{row.status}: {_cell(row.reason)}" if row.reason else row.status
        if row.status == "works" and row.evidence == NO_SERVER:
            status = "works, without a server"
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


def committed() -> tuple[str, list[Row]]:
    """The page of the committed results, and its rows."""
    record = json.loads(TESTS.read_text())
    rows = table(record["rows"], json.loads(GPU.read_text()))
    return page(record, rows, json.loads(VERSIONS.read_text())), rows


def main() -> None:
    made, rows = committed()
    PAGE.write_text(made)
    print(summary_line(rows))


if __name__ == "__main__":
    main()

"""Pytest marks for what is served and what is refused. docs/support.md is generated from the results of marked tests.

- ``@pytest.mark.works(GROUP, WHAT)``: the test shows that WHAT is served.
- ``@pytest.mark.refused(GROUP, WHAT)``: it shows that a launch with WHAT ends before loading. It records the message with
  ``record_property("reason", message)``.
- ``@pytest.mark.sglang_fails(GROUP, WHAT)``: it shows that SGLang without this plugin fails at WHAT, and records the message.
- ``@pytest.mark.nightly``: it runs only with ``--nightly``. ``--support FILE`` writes the result of each marked test
  (``scripts/support.sh``).
- ``@pytest.mark.sglang``: the unit test needs SGLang. A file of such tests has ``pytestmark = pytest.mark.sglang``.
- ``@pytest.mark.since(VERSION, WHY)``: it is skipped with an older SGLang. WHY is a fact about that SGLang or about the test.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Generator, Iterable
from datetime import datetime, timezone
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MARKERS = {
    "works(group, what)": "shows that WHAT is served; a row of docs/support.md",
    "refused(group, what)": "shows that WHAT ends a launch before loading, and records the reason",
    "sglang_fails(group, what)": "shows that SGLang without this plugin fails at WHAT, and records its error",
    "nightly": "runs only with --nightly",
    "since(version, why)": "skipped with an older SGLang",
    "sglang": "needs SGLang; not collected without it",
    "slow": "takes seconds; scripts/unit.sh skips it",
}
OLDER = "with SGLang before"
HAS_SGLANG = find_spec("sglang") is not None
WHOLE_FILE = "pytestmark = pytest.mark.sglang"
KINDS = ("works", "refused", "sglang_fails")


def skip_newer(items: Iterable[pytest.Item], installed: str) -> None:
    """Skips tests that are marked for a later SGLang than the ``installed`` version."""
    for item in items:
        for mark in item.iter_markers("since"):
            version, why = mark.args
            if _numbers(installed) < _numbers(version):
                item.add_marker(pytest.mark.skip(reason=f"{OLDER} {version}: {why}"))


def leave_out(config: pytest.Config, items: list[pytest.Item], marker: str) -> None:
    left = [item for item in items if item.get_closest_marker(marker) is not None]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker(marker) is None]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:3]]


def rows(item: pytest.Item) -> list[dict[str, str]]:
    """Returns the table rows that a test is for, with the test's name."""
    marks = [mark for mark in item.iter_markers() if mark.name in KINDS]
    return [
        dict(zip(("kind", "group", "what"), (mark.name, *mark.args), strict=True)) | {"test": item.nodeid} for mark in marks
    ]


class Support:
    """A pytest plugin that leaves out nightly tests and records the results of marked ones."""

    def __init__(self, config: pytest.Config):
        self.out: Path | None = config.getoption("--support")
        self.nightly = bool(config.getoption("--nightly"))
        self.found: list[dict[str, Any]] = []
        self.collected: list[pytest.Item] = []
        """All tests of the collected files, including nightly ones."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self.collected = list(items)
        if HAS_SGLANG:
            skip_newer(items, metadata.version("sglang"))
        else:
            leave_out(config, items, "sglang")
        if self.nightly:
            return
        leave_out(config, items, "nightly")

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Without SGLang, ignores files whose tests all need it, because they import it."""
        if HAS_SGLANG or collection_path.suffix != ".py":
            return None
        return WHOLE_FILE in collection_path.read_text().splitlines() or None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            given = dict(report.user_properties).get("reason", "")
            why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else given
            ended = {"outcome": report.outcome, "reason": str(why).removeprefix("Skipped: ")}
            self.found += [row | ended for row in rows(item)]
        return report

    def pytest_sessionfinish(self) -> None:
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            before = json.loads(self.out.read_text())["rows"] if self.out.exists() else []
            self.out.write_text(json.dumps(record(before, self.found, self.collected), indent=1) + "\n")


def record(before: Iterable[dict[str, Any]], found: list[dict[str, Any]], collected: Iterable[pytest.Item]) -> dict[str, Any]:
    """Returns what was found and with which versions. Entries from ``before`` stay if their tests did not run now, unless their
    file was collected without them or without their marks."""
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    versions = {"sglang": metadata.version("sglang"), "torch": metadata.version("torch"), "python": platform.python_version()}
    now = {"date": datetime.now(timezone.utc).date().isoformat(), "commit": git.stdout.strip()[:12], **versions}
    items = list(collected)
    ran, there = {row["test"] for row in found}, {item.nodeid for item in items if rows(item)}
    files = {file_of(item.nodeid) for item in items}
    kept = [row for row in before if row["test"] not in ran and (row["test"] in there or file_of(row["test"]) not in files)]
    return {"rows": sorted([*kept, *(row | now for row in found)], key=lambda row: (row["group"], row["what"], row["test"]))}


def file_of(test: str) -> str:
    return test.partition("::")[0]


def unrecorded(collected: Iterable[pytest.Item], recorded: Iterable[dict[str, Any]]) -> list[str]:
    """Lists differences between the marks of collected tests and a record. Skips files that were not collected and tests chosen
    by name, about which nothing is known."""
    key = ("kind", "group", "what", "test")
    items = list(collected)
    marked = {tuple(row[name] for name in key) for item in items for row in rows(item)}
    files = {file_of(item.nodeid) for item in items}
    written = {tuple(row[name] for name in key) for row in recorded if file_of(row["test"]) in files}
    new = [f"not recorded: {' | '.join(row)}" for row in sorted(marked - written)]
    return new + [f"recorded, and no test: {' | '.join(row)}" for row in sorted(written - marked)]

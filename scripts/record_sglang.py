"""Writes the results of a test run with the installed SGLang to ``versions.json``, and replaces that version's entry."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
VERSIONS = ROOT / "benchmarks" / "results" / "support" / "versions.json"


def outcomes(junit: Path) -> dict[str, list[str]]:
    """Returns the names of passed and failed tests, and the reasons of skipped ones."""
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in ElementTree.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[kind] += [name] if kind != "skipped" else [each.get("message", "") for each in case.iter("skipped")]
    return found


def entry(junit: Path, ran: list[str]) -> dict[str, Any]:
    """Returns the entry for the run with the results ``junit`` and the arguments ``ran``."""
    found = outcomes(junit)
    return {
        "sglang": version("sglang"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip(),
        "ran": ran,
        **{kind: len(names) for kind, names in found.items()},
        "failed_tests": sorted(set(found["failed"])),
        "skipped_as": dict(sorted(Counter(found["skipped"]).items())),
    }


def replaced(entries: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns ``entries`` with ``new`` in place of its version's entry, newest version first."""
    kept = [each for each in entries if each["sglang"] != new["sglang"]]
    return sorted([*kept, new], key=lambda each: [int(part) for part in each["sglang"].split(".")[:3]], reverse=True)


def main(junit: str, *ran: str) -> None:
    entries = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else []
    VERSIONS.parent.mkdir(parents=True, exist_ok=True)
    VERSIONS.write_text(json.dumps(replaced(entries, entry(Path(junit), list(ran))), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The rates of the link to host memory: what the sections of a GPU session measured, else the planner's assumptions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import serve_report
from sglang_uvm_offload.plan.inputs import Assumptions

COPIED_BY = "kernel, 16 blocks"
"""How stream buffers are filled, as logs of November 2026 name it."""
SECTIONS = ("ops", "runners", "probe", "stream", "miss", "layer")
"""Of a GPU session, that measure the link (those after ``runners`` did in November 2026)."""
MEASURED = {"sequential": "read", "copied": "copy", "engine": "link"}
"""The rates, by what the part ``link`` calls them."""


@dataclass(frozen=True)
class Rates:
    """GB/s."""

    read: float
    """Kernels that read in place."""
    copy: float
    """The kernel that fills stream buffers and slots."""
    link: float
    """The copy engine, which moves experts."""
    assumed: tuple[str, ...] = ()
    """Those that were not measured."""

    def __str__(self) -> str:
        shown = {"read": self.read, "copy": self.copy, "link": self.link}
        origins = {True: "assumed by the planner", False: "measured by the session"}
        return "; ".join(f"{name} rate {rate:.4g} GB/s, {origins[name in self.assumed]}" for name, rate in shown.items())


def rates_of(sections: list[dict[str, Any]], nominal: float, assumed: Assumptions) -> Rates:
    """The best that ``sections`` saw (in the part ``link``, and in November 2026 others), else assumed of a link
    of ``nominal`` GB/s."""
    found: dict[str, list[float]] = {"read": [], "copy": [], "link": []}
    for section in sections:
        for part in section.get("parts", {}).values():
            for row in part.get("rows", ()):
                if "median" in row and (name := measured_by(row)):
                    found[name].append(row["median"])
    link = max(found["link"], default=nominal)
    given = {"read": link * assumed.read_efficiency, "copy": link * assumed.copy_efficiency, "link": link}
    rates = {name: max(found[name], default=given[name]) for name in given}
    return Rates(**rates, assumed=tuple(name for name in given if not found[name]))


def measured_by(row: dict[str, Any]) -> str | None:
    """The rate that a row of a section is of. Copies of November 2026 are those beside a busy GPU, as steps that stream make
    them."""
    if row["row"] == "link":
        return MEASURED.get(row["of"])
    if row["row"] == "zero_copy" and row.get("memory") in ("managed", "pinned", "host_numa"):
        return "read"
    if row["row"] == "copies" and (row["source"], row["way"], row["gpu"]) == ("managed", COPIED_BY, "busy"):
        return "copy"
    return "link" if row["row"] == "copy_engine" and row.get("direction") == "to_device" else None


def beside(run: Path) -> list[Path]:
    """The sections of a session that measure the link, in the folder of a run, and the run itself if it is a section."""
    folder = run if run.is_dir() else run.parent
    found = [path for name in SECTIONS if (path := folder / f"{name}.json").is_file()]
    return found if run.is_dir() or run in found else [run, *found]


def section(path: Path) -> dict[str, Any]:
    """The JSON of a section of a session. Raises ``NotARun``, also for one that is no measurement."""
    try:
        if path.stat().st_size > serve_report.RUN_BYTES:
            raise serve_report.NotARun(f"{path}: larger than {serve_report.RUN_BYTES} bytes")
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise serve_report.NotARun(f"{path}: {error}") from None
    if found.get("measured") is not True:
        raise serve_report.NotARun(f"{path}: is no measurement of a GPU session")
    return found

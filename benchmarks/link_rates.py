"""The rates of the link to host memory: what the part ``link`` of a GPU session measured, else the planner's assumptions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.plan.inputs import Assumptions

MEASURED = {"sequential": "read", "copied": "copy", "engine": "link"}
"""The rates, by what the part calls them."""


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


def rates_of(rows: Iterable[dict[str, Any]], nominal: float, assumed: Assumptions) -> Rates:
    """What ``rows`` of the part ``link`` say, else assumed of a link of ``nominal`` GB/s."""
    found = {MEASURED[row["of"]]: row["median"] for row in rows if row["row"] == "link" and row["of"] in MEASURED}
    link = found.get("link", nominal)
    given = {"read": link * assumed.read_efficiency, "copy": link * assumed.copy_efficiency, "link": link}
    return Rates(**given | found, assumed=tuple(name for name in given if name not in found))

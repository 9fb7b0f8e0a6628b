"""Rates of the link to host memory: as the part ``link`` of a GPU session measured them, else as the planner assumes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.plan.inputs import Assumptions

MEASURED = {"sequential": "read", "copied": "copy", "engine": "link"}
"""Field of ``Rates`` by the name that the part gives the rate."""


@dataclass(frozen=True)
class Rates:
    """Rates in GB/s."""

    read: float
    """Kernels that read host memory in place."""
    copy: float
    """The kernel that fills stream buffers and slots."""
    link: float
    """The copy engine, which moves experts."""
    assumed: tuple[str, ...] = ()
    """Names of the rates that were not measured."""

    def __str__(self) -> str:
        shown = {"read": self.read, "copy": self.copy, "link": self.link}
        origins = {True: "assumed by the planner", False: "measured by the session"}
        return "; ".join(f"{name} rate {rate:.4g} GB/s, {origins[name in self.assumed]}" for name, rate in shown.items())


def rates_of(rows: Iterable[dict[str, Any]], nominal: float, assumed: Assumptions) -> Rates:
    """Takes rates from the ``rows`` of the part ``link``; assumes the others for a link of ``nominal`` GB/s."""
    found = {MEASURED[row["of"]]: row["median"] for row in rows if row["row"] == "link" and row["of"] in MEASURED}
    link = found.get("link", nominal)
    given = {"read": link * assumed.read_efficiency, "copy": link * assumed.copy_efficiency, "link": link}
    return Rates(**given | found, assumed=tuple(name for name in given if name not in found))

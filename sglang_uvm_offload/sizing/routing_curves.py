"""Hit rates of measured routing, by the share of experts that is resident: what a plan assumes of traffic that nobody measured.

``routing_curves.json`` holds them with their sources; ``benchmarks/routing_curves.py`` makes it from routing traces, and
describes how. The models that were traced are smaller than most that are planned, so a plan shows a range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

POLICIES = {
    "other": "residents chosen on other traffic",
    "warmup": "residents chosen in a warm-up",
    "continuous": "residents that follow the traffic",
}


@dataclass(frozen=True)
class HitRate:
    """The share of a layer's activations that residents serve, and what it was measured on."""

    rate: float
    policy: str
    """A key of ``POLICIES``."""
    traces: tuple[str, ...]
    requests: int
    """Concurrent requests of the measurement."""

    def described(self) -> str:
        return f"{POLICIES[self.policy]}, {self.requests} at once: {', '.join(self.traces)}"


@dataclass(frozen=True)
class HitRates:
    """``lowest`` and ``highest`` are of requests like those that chose the residents, ``other`` of unlike ones."""

    other: HitRate
    lowest: HitRate
    highest: HitRate

    def named(self) -> dict[str, HitRate]:
        return {"other traffic": self.other, "lowest measured": self.lowest, "highest measured": self.highest}


def hit_rates(family: str, requests: int, residency: float) -> HitRates:
    """What was measured at ``residency`` (0 to 1), with as many requests as are nearest to ``requests``. Of traces whose model
    is like ``family`` (a config's ``model_type``); of all traces, if there is none."""
    found = [
        HitRate(_interpolate(curve[policy], residency), policy, tuple(curve["traces"]), curve["requests"])
        for curve in _nearest(family, requests)
        for policy in ("warmup", "continuous")
    ]
    return HitRates(_other(residency), min(found, key=_rate), max(found, key=_rate))


def source_of(trace: str) -> str:
    """The model, the experts and the origin of a trace."""
    of = _content()["traces"][trace]
    return f"{trace} ({of['model']}, {of['top_k']} of {of['experts']} experts a token; {of['source']})"


def _rate(found: HitRate) -> float:
    return found.rate


def _other(residency: float) -> HitRate:
    (curve,) = [curve for curve in _content()["curves"] if "other" in curve]
    return HitRate(_interpolate(curve["other"], residency), "other", tuple(curve["traces"]), curve["requests"])


def _nearest(family: str, requests: int) -> list[dict[str, Any]]:
    """One curve for each trace of ``family``."""
    traces = _content()["traces"]
    names = [name for name, trace in traces.items() if family in trace["families"]] or list(traces)
    out = []
    for name in names:
        curves = [curve for curve in _content()["curves"] if curve["traces"] == [name]]
        out.append(min(curves, key=lambda curve: abs(math.log(curve["requests"] / requests))))
    return out


def _interpolate(rates: Sequence[float], residency: float) -> float:
    """Linear between the measured points, from 0 without residents to 1 with all of them."""
    points = [(0.0, 0.0), *zip(_content()["residencies"], rates, strict=True), (1.0, 1.0)]
    for (left, low), (right, high) in pairwise(points):
        if residency <= right:
            return float(low + (high - low) * (residency - left) / (right - left))
    return 1.0


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files(__package__) / "routing_curves.json").read_text())
    return content

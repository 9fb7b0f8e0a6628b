"""Hit rates of measured routing by the share of experts in VRAM, which a plan assumes for unmeasured traffic.

``routing_curves.json`` holds them with their sources; ``benchmarks/routing_curves.py`` generates it from routing traces and
describes how. The traced models are smaller than most planned ones, so a plan shows a range.
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

from sglang_uvm_offload.residency.slot_split import FINE_SHARE

MEASURED_SHARE = FINE_SHARE
"""The share of VRAM in slots at which the slot curves were measured: all of it, as ``auto`` chooses for the traced models."""
POLICIES = {
    "other": "residents chosen on other traffic",
    "warmup": "residents chosen in a warm-up",
    "continuous": "residents that follow the traffic",
    "other_slots": "slots alone, filled by other traffic at first",
    "slots": "slots alone",
}


@dataclass(frozen=True)
class HitRate:
    """The share of a layer's activations that residents and slots serve, and its measurement."""

    rate: float
    policy: str
    """A key of ``POLICIES``."""
    traces: tuple[str, ...]
    requests: int
    """Concurrent requests of the measurement."""

    def described(self) -> str:
        return f"{POLICIES[self.policy]}, {self.requests} at once: {', '.join(self.traces)}"


OTHER = "other traffic"


@dataclass(frozen=True)
class HitRates:
    """``lowest`` and ``highest``: traffic like that which chose the residents. ``other``: different traffic."""

    other: HitRate
    lowest: HitRate
    highest: HitRate

    def named(self) -> dict[str, HitRate]:
        return {OTHER: self.other, "lowest measured": self.lowest, "highest measured": self.highest}


def hit_rates(family: str, requests: int, residency: float, slot_share: float = 0.0) -> HitRates:
    """Measured hit rates with the share ``residency`` (0 to 1) of each layer's experts in VRAM, ``slot_share`` of them in
    slots, at the measured number of requests closest to ``requests``. Uses traces of models like ``family`` (a config's
    ``model_type``), or all traces if there are none.

    Slots were measured at ``MEASURED_SHARE``. A smaller share gets a proportional part of that gain, which understates it."""
    (other,) = [curve for curve in _content()["curves"] if "other" in curve]
    curves = _nearest(family, requests)
    if slot_share:
        weight = slot_share / MEASURED_SHARE
        found = [_hit_rate(curve, residency, "slots", "warmup", weight) for curve in curves]
        unlike = _hit_rate(other, residency, "other_slots", "other", weight)
    else:
        found = [_hit_rate(curve, residency, policy) for curve in curves for policy in ("warmup", "continuous")]
        unlike = _hit_rate(other, residency, "other")
    return HitRates(unlike, min(found, key=_rate), max(found, key=_rate))


def source_of(trace: str) -> str:
    """A trace's model, experts and origin."""
    of = _content()["traces"][trace]
    return f"{trace} ({of['model']}, {of['top_k']} of {of['experts']} experts a token; {of['source']})"


def _rate(found: HitRate) -> float:
    return found.rate


def _hit_rate(curve: dict[str, Any], residency: float, policy: str, without: str = "", weight: float = 1.0) -> HitRate:
    """The hit rate of ``policy``, mixed with that of the policy ``without`` slots if ``weight`` is below 1."""
    rate = weight * _interpolate(curve[policy], residency)
    rate += (1 - weight) * _interpolate(curve[without], residency) if weight < 1 else 0
    return HitRate(rate, policy, tuple(curve["traces"]), curve["requests"])


def _nearest(family: str, requests: int) -> list[dict[str, Any]]:
    """For each trace of ``family``, the curve with the closest number of requests."""
    traces = _content()["traces"]
    names = [name for name, trace in traces.items() if family in trace["families"]] or list(traces)
    out = []
    for name in names:
        curves = [curve for curve in _content()["curves"] if curve["traces"] == [name]]
        out.append(min(curves, key=lambda curve: abs(math.log(curve["requests"] / requests))))
    return out


def _interpolate(rates: Sequence[float], residency: float) -> float:
    """Linear interpolation between the measured points, from 0 without residents to 1 with all experts resident."""
    points = [(0.0, 0.0), *zip(_content()["residencies"], rates, strict=True), (1.0, 1.0)]
    for (left, low), (right, high) in pairwise(points):
        if residency <= right:
            return float(low + (high - low) * (residency - left) / (right - left))
    return 1.0


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((files(__package__) / "routing_curves.json").read_text())
    return content

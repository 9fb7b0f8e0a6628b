"""Goals of SGLang's other MoE runners: ratios taken from rows, or None where rows are missing. Pure."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.link_bound import link_rate
from benchmarks.gpu.rows import PartRows, find, one, show

Ratio = tuple[float, str]


def other_runner_outputs(part: str) -> Callable[[PartRows], Ratio | None]:
    """Replays out of managed memory or slots whose output is not that from plain VRAM."""

    def ratio(rows: PartRows) -> Ratio | None:
        found = find(rows.get(part, ()), "function_bits")
        kernels = " and ".join(dict.fromkeys(row["kernels"] for row in found))
        varies = sum(row["median"] for row in find(rows.get(part, ()), "function_varies"))
        words = f"{sum(row['done'] for row in found)} replays of {kernels}; {varies:g} differ between two runs over plain VRAM"
        return (sum(row["median"] for row in found), words) if found else None

    return ratio


def other_runner_counts(rows: PartRows) -> Ratio | None:
    """Counts of hits and fills, by expert, that are others than the tokens chose."""
    found = [row for part in ("marlin", "deep_gemm") for row in find(rows.get(part, ()), "function_counts")]
    hits = sum(row["hits"] for row in found)
    return (sum(row["median"] for row in found), f"{hits} hits in {len(found)} settings") if found else None


def in_place_over_the_bound(part: str, where: str) -> Callable[[PartRows], Ratio | None]:
    """The worst setting: a step that misses all its experts over one from plain VRAM and the missed bytes, each once, over the
    link at its measured rate."""

    def ratio(rows: PartRows) -> Ratio | None:
        link, found = link_rate(rows), []
        for step in find(rows.get(part, ()), "function_step", where=where):
            same = {name: step[name] for name in ("function", "batch")}
            plain = one(rows, part, "function_step", where="plain", missed_gb=0, **same)
            if link and link["median"] and plain:
                least = plain["median"] + 1e3 * step["missed_gb"] / link["median"]
                words = f"{same['function']}, batch {same['batch']}: {show(step)}; from plain VRAM {show(plain)}"
                found.append((step["median"] / least, f"{words}, {step['missed_gb']:.3g} GB at {show(link)}"))
        return max(found, default=None)

    return ratio

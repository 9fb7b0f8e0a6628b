"""Goals that cases meet or miss, and the tables of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def goal(text: str, met: list[bool], worst: str) -> dict[str, Any]:
    return {"goal": text, "met": f"{sum(met)} of {len(met)}", "all": all(met), "worst": worst}


def ratio(ours: float, theirs: float) -> float:
    """``ours / theirs``, where nothing on both sides is as good as equal."""
    return ours / theirs if theirs else float("inf") if ours else 1.0


def grid(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)

"""The results of ``hot_first.py``, and their page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.expert_orders import ANY_BYTE, CHECKPOINT, CO_USE, HOTTEST, ORDERS
from benchmarks.policy.verdicts import grid, ratio

SLACK = 0.005
"""How far below any-byte placement a layout may serve."""
FEWER = 3.0
"""How many times fewer spans a layout should move."""
WAYS = {"fixed": "fixed", "reselected": "re-selected", "continuous": "continuous"}
JUDGED = (CHECKPOINT, HOTTEST, CO_USE)


@dataclass
class Moved:
    """``calls`` of ``Memory.place``, one a tensor and direction; the ``spans`` that the driver gets in them."""

    calls: int = 0
    spans: int = 0
    nbytes: int = 0
    decisions: int = 0
    """Of continuous adaptation, those that moved anything."""

    @property
    def gib(self) -> float:
        return self.nbytes / (1 << 30)

    def a_decision(self, what: float) -> float:
        return what / max(self.decisions, 1)


@dataclass(frozen=True)
class Case:
    """``fixed``, ``reselected`` and ``continuous`` are shares of bytes served from VRAM in the judged half. ``start``: moves
    from the first experts of each layer to the residents that the first half chooses. ``again``: from these to the ones that
    the judged half chooses. ``followed``: by continuous adaptation, while the judged steps are served."""

    of: str
    on: str
    mib: tuple[float, ...]
    budget: float
    order: str
    fixed: float
    reselected: float
    continuous: float
    start: Moved
    again: Moved
    followed: Moved


Group = dict[str, Case]
"""The case of each order, of one traffic, geometry and budget."""


def read(path: Path) -> list[Case]:
    cases = []
    for each in json.loads(path.read_text()):
        moved = {what: Moved(**each[what]) for what in ("start", "again", "followed")}
        cases.append(Case(**each | {"mib": tuple(each["mib"])} | moved))
    return cases


def groups(cases: Sequence[Case]) -> list[Group]:
    found: dict[tuple[object, ...], Group] = {}
    for each in cases:
        found.setdefault((each.of, each.on, each.mib, each.budget), {})[each.order] = each
    return list(found.values())


def page(cases: Sequence[Case]) -> str:
    every = groups(cases)
    return "\n".join(
        [
            "# Experts laid out by a profile",
            "",
            "Made by `benchmarks/hot_first.py`, which explains orders and choices. No GPU took part. In short: how many cases",
            f"meet the goal, and how far. Goals: at most {100 * SLACK:g} points less from VRAM than by any-byte placement,",
            f"with residents chosen alike; {FEWER:g} times fewer spans than in the checkpoint's order. Budgets are whole",
            "blocks, so what lies in blocks may serve a little more than by any byte.",
            "",
            _verdicts(every),
            *(f"## Bytes served from VRAM, residents {name}\n\n{_shares(every, way)}" for way, name in WAYS.items()),
            "## Moves at once",
            "",
            "Spans, calls of `Memory.place` with them, and GiB, of all layers, up and down together. `start`: from the",
            "first experts of each layer to the residents of the first half. `again`: from these to those of the judged half.",
            "",
            _at_once(every),
            "## Moves of a decision",
            "",
            "Spans, calls and MiB, as the mean of the continuous decisions that move (in brackets: how many), of every third",
            "layer.",
            "",
            _followed(every),
        ]
    )


def _verdicts(every: Sequence[Group]) -> str:
    head = ("judged on", "order", *WAYS.values(), "spans again", "spans a decision", "decisions' spans in all")
    kinds = {"traffic like the profile's": False, "other traffic": True}
    rows = []
    for (kind, shifted), order in ((each, order) for each in kinds.items() for order in JUDGED):
        some = [group for group in every if (group[order].of != group[order].on) is shifted]
        if some:
            served = [_served(some, order, way) for way in WAYS]
            rows.append([kind, order, *served, *(_fewer(some, order, spans) for spans in (_again, _a_decision, _in_all))])
    return grid(head, rows)


def _served(some: Sequence[Group], order: str, way: str) -> str:
    lags = [getattr(group[order], way) - getattr(group[ANY_BYTE], way) for group in some]
    return f"{sum(lag >= -SLACK for lag in lags)} of {len(lags)}, {100 * min(lags):+.1f} points"


def _fewer(some: Sequence[Group], order: str, spans: Callable[[Case], float]) -> str:
    if order == CHECKPOINT:
        return "-"
    times = [ratio(spans(group[CHECKPOINT]), spans(group[order])) for group in some]
    return f"{sum(each >= FEWER for each in times)} of {len(times)}, {min(times):.1f} to {max(times):.1f} times fewer"


def _again(each: Case) -> float:
    return each.again.spans


def _a_decision(each: Case) -> float:
    return each.followed.a_decision(each.followed.spans)


def _in_all(each: Case) -> float:
    return each.followed.spans


def _shares(every: Sequence[Group], way: str) -> str:
    return _grid(every, list(ORDERS), lambda group: [f"{getattr(group[order], way):.3f}" for order in ORDERS])


def _at_once(every: Sequence[Group]) -> str:
    columns = [(what, order) for what in ("start", "again") for order in JUDGED]

    def cells(group: Group) -> list[str]:
        moved: list[Moved] = [getattr(group[order], what) for what, order in columns]
        return [f"{each.spans}, {each.calls}, {each.gib:.2f}" for each in moved]

    return _grid(every, [f"{what}, {order}" for what, order in columns], cells)


def _followed(every: Sequence[Group]) -> str:
    return _grid(every, list(JUDGED), lambda group: [_of_a_decision(group[order].followed) for order in JUDGED])


def _of_a_decision(moved: Moved) -> str:
    means = map(moved.a_decision, (moved.spans, moved.calls, 1024 * moved.gib))
    return f"{', '.join(f'{mean:.1f}' for mean in means)} ({moved.decisions})"


def _grid(every: Sequence[Group], columns: list[str], cells: Callable[[Group], list[str]]) -> str:
    rows = []
    for group in every:
        each = group[CHECKPOINT]
        mib = " + ".join(f"{size:g}" for size in each.mib)
        rows.append([each.of, each.on, mib, f"{each.budget:.0%}", *cells(group)])
    return grid(("order of", "judged on", "MiB an expert", "budget", *columns), rows)

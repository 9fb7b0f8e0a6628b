"""A server's status as lines of text: a table with a row for each rank, or one line for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_uvm_offload.report.rank_names import names_of
from sglang_uvm_offload.report.source import hit_rate
from sglang_uvm_offload.residency.status import OffloadStatus, RankId, RankStatus
from sglang_uvm_offload.units import size

_TITLES = ("rank", "experts", "GiB", "rate", "MiB/step", "GB/s", "promotions", "GiB free")
_ABOVE = (("", 1), ("residents", 2), ("hit", 1), ("over the link", 2), ("", 1), ("host RAM", 1))
"""Titles above the titles, each with the columns that it spans."""
_GAP = "  "
_LEAST_WIDTH = 7
"""The least width of a column of numbers: narrower ones would jump from one table to the next."""


@dataclass(frozen=True)
class Look:
    """A server's answer, and the local time at which it came."""

    status: OffloadStatus
    at: time.struct_time

    @property
    def clock(self) -> str:
        return time.strftime("%H:%M:%S", self.at)


@dataclass(frozen=True)
class _Growth:
    """What a rank did since an earlier answer, or since its start."""

    seconds: float
    steps: int
    tokens: int
    routed: int
    routed_resident: int
    read_bytes: int
    """Bytes that steps read over the link: in place, streamed and into slots."""
    moves: int

    @classmethod
    def of(cls, rank: RankStatus, earlier: RankStatus | None) -> _Growth:
        now = _totals(rank)
        then = [0.0] * len(now) if earlier is None else _totals(earlier)
        if any(old > new for old, new in zip(then, now, strict=True)):  # another server has taken its place
            then = [0.0] * len(now)
        seconds, *counts = (new - old for old, new in zip(then, now, strict=True))
        return cls(seconds, *map(int, counts))

    @property
    def hit_rate(self) -> float | None:
        return hit_rate(self.routed_resident, self.routed)

    @property
    def mib_per_step(self) -> float | None:
        return self.read_bytes / self.steps / 2**20 if self.steps else None

    @property
    def gb_per_second(self) -> float | None:
        return self.read_bytes / self.seconds / 1e9 if self.seconds else None


def status_table(source: str, look: Look, before: Look | None) -> list[str]:
    """The lines of a table, and what else a person should know. Rates and hit rates are those since ``before``; None: since the
    start. 79 columns but for long names, messages and numbers."""
    ranks, growths = look.status.ranks, _growths(look, before)
    names = names_of(ranks)
    rows = [_TITLES, *(_row(name, rank, growths[rank.rank]) for name, rank in zip(names, ranks, strict=True))]
    table = _aligned(rows)
    return [f"{source}  {look.clock}", _summary(list(growths.values()), before), "", *table, *_notes(look.status, names)]


def status_line(look: Look, before: Look | None) -> str:
    """One line for all ranks: of the link, what the rank with the most reads."""
    growths = list(_growths(look, before).values())
    ranks = look.status.ranks
    hit_rate = _shared_hit_rate(growths)
    parts = [
        _summary(growths, before),
        "no hit rate" if hit_rate is None else f"hit rate {100 * hit_rate:.1f} %",
        f"up to {_most(growths, 'mib_per_step')} MiB/step and {_most(growths, 'gb_per_second')} GB/s over the link",
        f"{sum(growth.moves for growth in growths)} promotions",
        f"{_free(ranks)} GiB of host RAM free",
    ]
    return f"{look.clock} " + "; ".join([*parts, *_notes(look.status, names_of(ranks))])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of ``rows``, the first of which has the titles, below those that span columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[1:] = [max(_LEAST_WIDTH, width) for width in widths[1:]]
    spans, column = [], 0
    for title, columns in _ABOVE:
        width = sum(widths[column : column + columns]) + len(_GAP) * (columns - 1)
        spans.append(f"{title:>{width}}")
        column += columns
    lines = [[f"{row[0]:<{widths[0]}}", *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return [_GAP.join(line).rstrip() for line in (spans, *lines)]


def _growths(look: Look, before: Look | None) -> dict[RankId, _Growth]:
    earlier = {} if before is None else {rank.rank: rank for rank in before.status.ranks}
    return {rank.rank: _Growth.of(rank, earlier.get(rank.rank)) for rank in look.status.ranks}


def _totals(rank: RankStatus) -> list[float]:
    """In the order of the fields of ``_Growth``."""
    past = rank.history
    read = past.zero_copy_bytes[-1] + past.streamed_bytes[-1] + past.filled_bytes[-1]
    columns = (past.seconds, past.steps, past.tokens, past.routed, past.routed_resident)
    return [*(column[-1] for column in columns), read, past.moves[-1]]


def _summary(growths: Sequence[_Growth], before: Look | None) -> str:
    """Steps and tokens of the rank that took the most steps. All ranks of a replica take the same."""
    most = max(growths, key=lambda growth: growth.steps, default=None)
    if most is None:
        return "no rank has answered"
    since = "since the start" if before is None else f"in the last {most.seconds:.1f} s"
    return f"{since}: {most.steps} steps, {most.tokens} tokens"


def _row(name: str, rank: RankStatus, growth: _Growth) -> tuple[str, ...]:
    hit_rate, step, rate = growth.hit_rate, growth.mib_per_step, growth.gb_per_second
    return (
        name,
        f"{rank.resident_experts}/{rank.num_experts}",
        f"{rank.resident_bytes / 2**30:.2f}",
        "-" if hit_rate is None else f"{100 * hit_rate:.1f} %",
        "-" if step is None else f"{step:.1f}",
        "-" if rate is None else f"{rate:.2f}",
        f"{growth.moves}{'+' if rank.moving else ''}",
        "-" if rank.host_free_bytes is None else f"{rank.host_free_bytes / 2**30:.1f}",
    )


def _shared_hit_rate(growths: Sequence[_Growth]) -> float | None:
    return hit_rate(sum(growth.routed_resident for growth in growths), sum(growth.routed for growth in growths))


def _most(growths: Sequence[_Growth], name: str) -> str:
    found = [value for growth in growths if (value := getattr(growth, name)) is not None]
    return f"{max(found):.2f}" if found else "-"


def _free(ranks: Sequence[RankStatus]) -> str:
    found = [rank.host_free_bytes for rank in ranks if rank.host_free_bytes is not None]
    return f"{min(found) / 2**30:.1f}" if found else "-"


def _notes(status: OffloadStatus, names: Sequence[str]) -> list[str]:
    """What is wrong, slow or held, each once with the ranks that it concerns."""
    found: dict[str, list[str]] = {}
    for name, rank in zip(names, status.ranks, strict=True):
        for note in _rank_notes(rank):
            found.setdefault(note, []).append(name)
    notes = [note if len(of) == len(names) else f"{', '.join(of)}: {note}" for note, of in found.items()]
    if status.left_out:
        notes.append(f"ranks left out: {status.left_out} (on other nodes, or without an answer in time)")
    return notes


def _rank_notes(rank: RankStatus) -> list[str]:
    notes = [] if rank.link is None else [rank.link.verdict(), *rank.link.because]
    notes += ["paused: residents stay until resume"] if rank.paused else []
    notes += [] if rank.warmup_done else ["the warm-up is not over"]
    notes += [f"FAULT: {rank.fault}"] if rank.fault is not None else []
    if rank.streaming is not None and rank.streaming.fault is not None:
        notes.append(f"FAULT: streaming: {rank.streaming.fault}")
    if rank.trace is not None and rank.trace.stopped:
        notes.append("FAULT: the trace has stopped")
    notes += [f"FAULT: saving the {save.what}: {save.error}" for save in rank.saves if save.error is not None]
    return notes + ([f"{size(rank.evicted_bytes)} of residents are evicted from VRAM"] if rank.evicted_bytes else [])

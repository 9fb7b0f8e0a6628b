"""The design's goals, each a ratio of medians within one run. Pure: rows in, verdicts out. Wrong bytes, outputs or answers are
not goals: they fail their part.

Without real kernels, ratios are still computed, so that this code runs everywhere, but nothing is judged. A ratio is None if
its rows are missing, and otherwise comes with the values it was computed from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.rows import PartRows, Row, best, find, one, show
from sglang_uvm_offload.residency.budget import DRIVER_BYTES

Ratio = tuple[float, str]
Judge = Callable[[PartRows], Ratio | None]


@dataclass(frozen=True)
class Goal:
    text: str
    sense: str
    """``>=`` or ``<=``."""
    limit: float
    ratio: Judge

    def judge(self, rows: PartRows, measured: bool) -> dict[str, Any]:
        found = self.ratio(rows)
        holds = operator.ge if self.sense == ">=" else operator.le
        return {
            "goal": self.text,
            "limit": f"{self.sense} {self.limit:g}",
            "ratio": found and found[0],
            "from": found and found[1],
            "met": holds(found[0], self.limit) if found and measured else None,
        }


def compared(top: Row | None, bottom: Row | None, words: str = "") -> Ratio | None:
    """Returns the ratio of the medians, ``top`` over ``bottom``."""
    if not top or not bottom or not bottom["median"]:
        return None
    return top["median"] / bottom["median"], f"{words}{show(top)}; {show(bottom)}"


def worst_of(ratios: Sequence[Ratio | None], *, least: bool = False) -> Ratio | None:
    """Returns the highest ratio, or the lowest with ``least``."""
    return (min if least else max)(filter(None, ratios), default=None)


# ---- the memory layer, the link and slots ----

BATCH_GIB = DRIVER_BYTES / (1 << 30)
"""The driver allocates VRAM for managed pages in batches of this size."""


def used_after_load(rows: PartRows) -> Ratio | None:
    """The worst load's error in batches of the driver. As a share of free VRAM any error would look small."""
    found = best(find(rows.get("load", ()), "load", figure="error of VRAM used"))
    return (found["median"] / BATCH_GIB, f"{show(found)} off the prediction") if found else None


def slow_replays(rows: PartRows) -> Ratio | None:
    """p99 of replays during moves of 16 MiB at a time over p99 while all bytes move in one call."""
    found = find(rows.get("sustained", ()), "sustained", figure="p99")
    by_size = {int(row["moves"].split()[0]): row for row in found if row["moves"] != "none"}
    sizes = sorted(by_size)
    return compared(by_size[sizes[-2]], by_size[sizes[-1]]) if len(sizes) > 1 else None


def link_rate(rows: PartRows) -> Row | None:
    """The rate at which kernels read host memory."""
    return one(rows, "link", "link", of="sequential")


def seconds_at_start(rows: PartRows) -> Ratio | None:
    alone, together = (one(rows, "link", "link_seconds", of=of) for of in ("one rank alone", "all at once"))
    if alone is None or together is None:
        return None
    return 8 * alone["median"] + together["median"], f"one alone {show(alone)}; all at once {show(together)}"


def engine(rows: PartRows) -> Ratio | None:
    return compared(one(rows, "link", "link", of="engine"), one(rows, "link", "link_pinned"))


def far_apart(rows: PartRows) -> Ratio | None:
    """Compares scattered with sequential reads in the largest memory."""
    scattered = max(find(rows.get("reach", ()), "reach", of="scattered"), key=lambda row: float(row["gib"]), default=None)
    neighbours = one(rows, "reach", "reach", of="sequential", gib=scattered["gib"]) if scattered else None
    return compared(scattered, neighbours)


def by_readers(rows: PartRows) -> Ratio | None:
    """Compares populating with as many reader threads as the plugin uses to a prefetch alone."""
    readers, alone = (one(rows, "populate", "populate", of="new pages", readers=number) for number in (4, 0))
    return compared(readers, alone)


def resolving(rows: PartRows) -> Ratio | None:
    worst = best(find(rows.get("resolve", ()), "resolve"))
    return (worst["median"], f"{worst['slots']} slots, batch {worst['batch']}: {show(worst)}") if worst else None


def aligning(rows: PartRows) -> Ratio | None:
    """Compares the slots' alignment with SGLang's aligner, in the worst setting."""
    found = []
    for slots in find(rows.get("resolve", ()), "align", way="slots"):
        same = {name: slots[name] for name in ("slots", "batch")}
        found.append(compared(slots, one(rows, "resolve", "align", way="SGLang", **same)))
    return worst_of(found)


def overlapping(rows: PartRows) -> Ratio | None:
    """Compares steps with the most misses."""
    found = find(rows.get("overlap", ()), "overlap", way="beside")
    return compared(found[-1], one(rows, "overlap", "overlap", way="before", misses=found[-1]["misses"])) if found else None


def looking_ahead(rows: PartRows, way: str) -> Ratio | None:
    """Compares steps with the fewest misses, where the link is idle."""
    found = find(rows.get("ahead", ()), "ahead", way=way)
    return compared(found[0], one(rows, "ahead", "ahead", way="none", misses=found[0]["misses"])) if found else None


FEWEST_FILLS = 4
"""The fewest fills per layer that are judged by rate: one small expert is copied before the link is full, by any method."""


def filling(rows: PartRows) -> Ratio | None:
    """Rate of fills into slots over a plain copy, for the worst number and size of experts."""
    found = []
    for slots in find(rows.get("fill", ()), "fill", way="slots"):
        same = {name: slots[name] for name in ("fills", "expert_mib")}
        copy = one(rows, "fill", "fill", way="copy kernel", **same)
        if slots["fills"] >= FEWEST_FILLS:
            found.append(compared(slots, copy, f"{same['fills']} of {same['expert_mib']:g} MiB: "))
    return worst_of(found, least=True)


def slots_in_vram(rows: PartRows) -> Ratio | None:
    """Read rate of slots over plain VRAM, for the worst expert size."""
    found = []
    for slots in find(rows.get("fill", ()), "slot_read", what="slots"):
        plain = best(find(rows["fill"], "slot_read", what="plain VRAM", expert_mib=slots["expert_mib"]))
        found.append(compared(slots, plain, f"slots of {slots['expert_mib']:g} MiB: "))
    return worst_of(found, least=True)


def false_alarms(rows: PartRows) -> Ratio | None:
    rooms = ("noticed with room", "noticed with room, beside reads that fill the link")
    found = [row for figure in rooms for row in find(rows.get("noticing", ()), "noticing", figure=figure)]
    looks = sum(len(row["values"]) for row in found)
    return (max(row["high"] for row in found), f"{looks} looks") if found else None


# ---- SGLang's runners ----


def in_place_over_the_bound(part: str, where: str) -> Judge:
    """Returns a judge of the worst setting: time of a step that misses all its experts, over a step from plain VRAM plus each
    missed byte once over the link at its measured rate."""

    def ratio(rows: PartRows) -> Ratio | None:
        link, found = link_rate(rows), []
        for step in find(rows.get(part, ()), "function_step", where=where):
            same = {name: step[name] for name in ("function", "batch")}
            plain = one(rows, part, "function_step", where="plain", missed_gb=0, **same)
            if link and link["median"] and plain:
                least = plain["median"] + 1e3 * step["missed_gb"] / link["median"]
                words = f"{same['function']}, batch {same['batch']}: {show(step)}; from plain VRAM {show(plain)}"
                found.append((step["median"] / least, f"{words}, {step['missed_gb']:.3g} GB at {show(link)}"))
        return worst_of(found)

    return ratio


# ---- servers ----

REACHED = 1.15
"""The accepted factor over the least time that the link allows."""


def behind(part: str, peer: str, ours: str, *batches: int) -> Judge:
    """Returns a judge of a peer's decode time over that of ``ours``: the lowest ratio of these batches."""

    def ratio(rows: PartRows) -> Ratio | None:
        found = []
        for batch in batches:
            theirs, mine = (one(rows, part, "decode", contender=name, batch=batch) for name in (peer, ours))
            found.append(compared(theirs, mine, f"batch {batch}: {peer}, {ours}: "))
        return None if None in found else worst_of(found, least=True)

    return ratio


def over_the_bound(kind: str, overlapped: bool = False) -> Judge:
    """Returns a judge of the worst ratio of this plugin's time to the least that its reads allow: the resident server's time
    plus each missed byte once over the link at its measured rate. ``overlapped``: the longer of the two instead of the sum."""

    def ratio(rows: PartRows) -> Ratio | None:
        link, found = link_rate(rows), []
        if link is None or not link["median"]:
            return None
        for mine, resident, residency in pairs(rows, kind, "frequency"):
            reading = mine["read_bytes"] / (1e9 * link["median"])
            least = max(resident["seconds"], reading) if overlapped else resident["seconds"] + reading
            times = [f"{1e3 * seconds:.4g} ms" for seconds in (mine["seconds"], resident["seconds"], reading)]
            missed = f"{mine['read_bytes'] / 1e9:.4g} GB at {show(link)}"
            words = f"{kind} {mine['size']}, {residency:.0%} resident: {times[0]}; all resident {times[1]}, {missed} {times[2]}"
            found.append((mine["seconds"] / least, words))
        return worst_of(found)

    return ratio


def pairs(rows: PartRows, kind: str, contender: str) -> Iterator[tuple[Any, Any, float]]:
    """Yields each figure of the contender with the resident server's of the same part and size, and the residency."""
    for part in SERVED:
        cells = [row["cell"] for row in rows.get(part, ()) if row["row"] == "cell"]
        resident = {key: point for cell in cells if cell["contender"] == "resident" for key, point in points(cell)}
        for cell in cells:
            for key, point in points(cell):
                if cell["contender"] == contender and key[0] == kind and "read_bytes" in point and key in resident:
                    yield point, resident[key], cell["residency"]


def points(cell: dict[str, Any]) -> Iterator[tuple[tuple[str, int], dict[str, Any]]]:
    """Yields the cell's figures by kind and size."""
    for point in cell["points"]:
        if not point["error"]:
            yield (point["kind"], point["size"]), point


def loading(rows: PartRows) -> Ratio | None:
    found = []
    for part in rows:
        resident, ours = (one(rows, part, "load", contender=name) for name in ("resident", "frequency"))
        found.append(compared(ours, resident, f"{part}: "))
    return worst_of(found)


SERVED = ("decode", "most")
"""The parts that serve this plugin with its defaults."""
IN_PLACE = "a step of {} in place over one from plain VRAM plus missed bytes at the link's rate (worst)"

GOALS: dict[str, tuple[Goal, ...]] = {
    "ops": (
        Goal("VRAM used after a load off the prediction, in batches of 128 MiB", "<=", 1, used_after_load),
        Goal("the copy engine's rate as a server measures it over that from pinned memory", ">=", 0.9, engine),
        Goal("seconds in which eight ranks measure their links, in turn and at once", "<=", 2, seconds_at_start),
        Goal("reads of experts far apart over reads of neighbours, in 24 GiB", ">=", 0.9, far_apart),
        Goal("p99 of replays while 16 MiB move at a time over that while all move in one call", "<=", 1, slow_replays),
        Goal("populating by 4 threads that read and a prefetch over that by a prefetch alone", ">=", 1.2, by_readers),
    ),
    "slots": (
        Goal("microseconds of a layer to resolve slots with nothing to fill (worst)", "<=", 2, resolving),
        Goal("aligning and resolving few ids over SGLang's aligner alone (worst)", "<=", 1, aligning),
        Goal(
            "a step whose w2 comes beside its first GEMM over one that waits (most misses)",
            "<=",
            1,
            overlapping,
        ),
        Goal("a step with right guesses over one without (fewest misses)", "<=", 0.9, partial(looking_ahead, way="right")),
        Goal("a step with wrong guesses over one without (fewest misses)", "<=", 1.01, partial(looking_ahead, way="wrong")),
        Goal("fills of 4 and more experts over a copy of them (worst)", ">=", 0.9, filling),
        Goal("read rate of slots over that of plain VRAM (worst)", ">=", 0.9, slots_in_vram),
    ),
    "runners": (
        Goal(IN_PLACE.format("Triton"), "<=", REACHED, in_place_over_the_bound("triton", "in place")),
        Goal(IN_PLACE.format("Marlin"), "<=", REACHED, in_place_over_the_bound("marlin", "in place")),
        Goal(IN_PLACE.format("DeepGEMM"), "<=", REACHED, in_place_over_the_bound("deep_gemm", "in place, expert 0 in VRAM")),
    ),
    "server": (
        Goal(
            "paged experts' decode time over this plugin's by slots alone (least gain)",
            ">=",
            1,
            behind("decode", "paged_experts", "slots_only", 1, 4, 16, 64),
        ),
        Goal(
            "decode time by slots alone beside stream buffers over that with the buffers' VRAM as slots (least gain)",
            ">=",
            1,
            behind("decode", "slots_only", "without_buffers", 1, 4, 16, 64),
        ),
        *(
            Goal(
                f"this plugin's {kind} time over all resident plus missed bytes at the link's rate (worst size)",
                "<=",
                REACHED,
                over_the_bound(kind),
            )
            for kind in ("decode", "prefill")
        ),
        Goal(
            "this plugin's prefill time over the longer of all resident and missed bytes at the link's rate (worst size)",
            "<=",
            1.1,
            over_the_bound("prefill", overlapped=True),
        ),
        Goal("a server's seconds of loading a GiB, with offloading over without (worst)", "<=", 1.1, loading),
        *(
            Goal(f"{name}'s decode time over this plugin's, batch 1", ">=", 5, behind(part, part, "frequency", 1))
            for part, name in (("cpu_offload_gb", "--cpu-offload-gb"), ("offloader_v2", "OffloaderV2"))
        ),
    ),
    "eviction": (Goal("MiB of residents taken for evicted while there was room", "<=", 0, false_alarms),),
}

"""The goals of the design, each a ratio of medians of one run. Pure: rows in, verdicts out.

Where kernels do not compute, ratios are still taken, so that this code runs everywhere, but nothing is judged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.link_bound import over_the_bound
from benchmarks.gpu.rows import PartRows, Row, best, find, one, show
from benchmarks.gpu.runner_bounds import in_place_over_the_bound, other_runner_counts, other_runner_outputs
from benchmarks.gpu.slot_bounds import (
    filling,
    other_decisions,
    other_outputs,
    other_rows,
    other_streams,
    resolving,
    slots_in_vram,
)
from benchmarks.gpu.stream_goals import (
    gained,
    host_time,
    in_vram,
    miss,
    never_slower,
    other_bytes,
    over_the_longer,
    partly_resident,
    starts_beside,
    zero_copy,
)
from sglang_uvm_offload.sizing.inputs import Assumptions


@dataclass(frozen=True)
class Goal:
    text: str
    sense: str
    """">=" or "<="."""
    limit: float
    ratio: Callable[[PartRows], tuple[float, str] | None]
    """The ratio and what it was taken from; None where the rows for it are missing."""

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


def over(top: Row | None, bottom: Row | None) -> float | None:
    return top["median"] / bottom["median"] if top and bottom and bottom["median"] else None


def promotion_rate(rows: PartRows) -> tuple[float, str] | None:
    found = []
    for size in (8, 16):
        engine = one(rows, "prefetch", "copy_engine", direction="to_device", piece_mib=size)
        moved = best(find(rows.get("prefetch", ()), "prefetch", direction="to_device", gpu="idle", piece_mib=size))
        ratio = over(moved, engine)
        if ratio is not None and moved and engine:
            found.append((ratio, f"{size} MiB, {moved['calls']} calls: {show(moved)}; copy engine {show(engine)}"))
    return max(found, default=None)


def demotion_rate(rows: PartRows) -> tuple[float, str] | None:
    """By the calls that a re-selection makes, one a span. The worst size."""
    found = []
    for size in (8, 16):
        down: dict[str, str | float] = {"direction": "to_host", "piece_mib": size}
        engine = one(rows, "prefetch", "copy_engine", **down)
        moved = one(rows, "prefetch", "prefetch", gpu="idle", calls="single", **down)
        ratio = over(moved, engine)
        if ratio is not None and moved and engine:
            found.append((ratio, f"{size} MiB, single calls: {show(moved)}; copy engine {show(engine)}"))
    return min(found, default=None)


def wrong_replays(rows: PartRows) -> tuple[float, str] | None:
    parts = ("stall_tma", "sustained")
    found = [row for part in parts for row in find(rows.get(part, ()), part, figure="replays that read other bytes")]
    return (sum(row["median"] for row in found), f"{len(found)} arms of loads and moves") if found else None


def false_alarms(rows: PartRows) -> tuple[float, str] | None:
    rooms = ("noticed with room", "noticed with room, beside reads that fill the link")
    found = [row for figure in rooms for row in find(rows.get("noticing", ()), "noticing", figure=figure)]
    looks = sum(len(row["values"]) for row in found)
    return (max(row["high"] for row in found), f"{looks} looks") if found else None


def resident_step(rows: PartRows) -> tuple[float, str] | None:
    worst = None
    for part in ("glm-4.5-air", "deepseek-v3", "glm-5"):
        for plain in find(rows.get(part, ()), "decode", arm="plain"):
            same = {name: plain[name] for name in ("shape", "weights", "batch")}
            managed = one(rows, part, "decode", arm="managed", resident=1.0, **same)
            ratio = over(managed, plain)
            if ratio is not None and managed and (worst is None or ratio > worst[0]):
                words = " ".join(map(str, same.values()))
                worst = ratio, f"{words}: managed {show(managed)}, plain {show(plain)}"
    return worst


def counting(rows: PartRows) -> tuple[float, str] | None:
    shares = find(rows.get("counters", ()), "counters_share")
    worst = best(shares)
    return (worst["median"], f"batch {worst['batch']}: {show(worst)}") if worst else None


def replays_that_differ(rows: PartRows) -> tuple[float, str] | None:
    found = one(rows, "moves", "moves")
    if not found or "moves" not in found:
        return None
    words = f"{found['moves']} moves, {found['captures']} capture, {found['moved_gb']:.3g} GB asked to move"
    return found["median"] + found["captures"] - 1, words


BATCH_GIB = Assumptions.driver_batch_mib / 1024
"""The driver takes VRAM for managed pages in batches."""


def loading(rows: PartRows) -> tuple[float, str] | None:
    worst = None
    for part in SERVED["server"]:
        resident, ours = (one(rows, part, "load", contender=name) for name in ("resident", "frequency"))
        ratio = over(ours, resident)
        if ratio is not None and ours and resident and (worst is None or ratio > worst[0]):
            worst = ratio, f"{part}: {show(ours)}; resident {show(resident)}"
    return worst


def engine_at_start(rows: PartRows) -> tuple[float, str] | None:
    measured, pinned = one(rows, "start_link", "start_link", of="engine"), one(rows, "start_link", "start_link_pinned")
    ratio = over(measured, pinned)
    return (ratio, f"{show(measured)}; pinned {show(pinned)}") if ratio is not None and measured and pinned else None


def seconds_at_start(rows: PartRows) -> tuple[float, str] | None:
    alone, together = (one(rows, "start_link", "start_link_seconds", of=of) for of in ("one rank alone", "all at once"))
    if alone is None or together is None:
        return None
    return 8 * alone["median"] + together["median"], f"one alone {show(alone)}; all at once {show(together)}"


def other_table_rows(rows: PartRows) -> tuple[float, str] | None:
    found = find(rows.get("tables", ()), "table_rows_wrong", where="managed")
    return (sum(row["median"] for row in found), f"{sum(row['read'] for row in found)} rows read") if found else None


def table_rows_of_a_step(rows: PartRows) -> tuple[float, str] | None:
    found = one(rows, "tables", "table_rows", where="managed", tokens=64)
    return (found["median"], show(found)) if found else None


def used_after_load(rows: PartRows) -> tuple[float, str] | None:
    """The worst load's error, in batches: of the free VRAM it would be a small share whatever the error."""
    found = best(find(rows.get("load", ()), "load", figure="error of VRAM used"))
    return (found["median"] / BATCH_GIB, f"{show(found)} off the prediction") if found else None


SERVED = {
    "server": ("frequency", "most"),
    "default": ("continuous", "fixed"),
    "serving_slots": ("split",),
    "bounds": ("first_n", "bounds"),
    "peers": ("paged_experts",),
    "cpu_offload": ("cpu_offload_gb",),
    "offloader": ("offloader_v2",),
}
"""The parts of each section that serve; each has a resident server of its own."""


def slowdown(rows: PartRows, part: str, contender: str, over_: str, kind: str, **labels: float) -> tuple[float, str] | None:
    """The worst ratio of one contender's time to another's, over the sizes that both served in a part."""
    worst = None
    for mine in find(rows.get(part, ()), kind, contender=contender, **labels):
        size = {name: mine[name] for name in ("batch", "tokens") if name in mine}
        own = {} if over_ == "resident" else {"resident": mine["resident"]}
        theirs = one(rows, part, kind, contender=over_, **size, **own)
        found = over(mine, theirs)
        if found is not None and theirs and (worst is None or found > worst[0]):
            words = " ".join(f"{name} {value}" for name, value in size.items())
            worst = found, f"{words}: {contender} {show(mine)}, {over_} {show(theirs)}"
    return worst


def served_decode(share: float) -> Callable[[PartRows], tuple[float, str] | None]:
    """The worst of the section's parts."""

    def ratio(rows: PartRows) -> tuple[float, str] | None:
        found = [slowdown(rows, part, "frequency", "resident", "decode", resident=share) for part in SERVED["server"]]
        return max(filter(None, found), default=None)

    return ratio


def behind(
    contender: str, kind: str, *sizes: int, ours: str = "frequency", part: str | None = None
) -> Callable[[PartRows], tuple[float, str] | None]:
    """Another's time over that of ``ours``: the smallest of these sizes' ratios. ``part``: by default named after the other."""
    name = "batch" if kind == "decode" else "tokens"

    def ratio(rows: PartRows) -> tuple[float, str] | None:
        found = [slowdown(rows, part or contender, contender, ours, kind, **{name: size}) for size in sizes]
        return None if None in found else min(filter(None, found), default=None)

    return ratio


def streaming_gains(rows: PartRows) -> tuple[float, str] | None:
    """The least of the prompts' ratios: the time of a server that reads in place over that of one that streams."""
    sizes = {row["tokens"] for row in find(rows.get("first_n", ()), "prefill", contender="in_place")}
    found = [slowdown(rows, "first_n", "in_place", "frequency", "prefill", tokens=size) for size in sizes]
    return min(filter(None, found), default=None)


def other_answers(section: str) -> Callable[[PartRows], tuple[float, str] | None]:
    """Servers of this plugin whose answers were not the resident server's."""

    def ratio(rows: PartRows) -> tuple[float, str] | None:
        ours = ("continuous", "first_n", "frequency", "in_place", "zero_copy", "slots_only", "residents_and_slots")
        found = [
            row for part in SERVED[section] for row in find(rows.get(part, ()), "same_answers") if row["contender"] in ours
        ]
        return (sum(row["median"] == 0 for row in found), f"{len(found)} servers") if found else None

    return ratio


def other_in_modes(rows: PartRows) -> tuple[float, str] | None:
    found = {part: row["values"] for part in rows for row in find(rows[part], "same_answers")}
    wrong = sum(values.count(0.0) for values in found.values())
    return (wrong, f"{sum(map(len, found.values()))} answers in {', '.join(found)}") if found else None


def promotions_after(rows: PartRows) -> tuple[float, str] | None:
    """How many experts a server brought to VRAM once its traffic had changed."""
    found = one(rows, "continuous", "promotions", contender="continuous", topic="after")
    return (sum(found["values"]), f"{len(found['values'])} rounds of another topic: {show(found)}") if found else None


REACHED = 1.15
"""Of the least time that the link allows."""


def reachable(contender: str, *parts: str) -> tuple[Goal, ...]:
    """What a server can be held to whatever its wish: a wish that is missed while these are met is missed by the link."""
    return tuple(
        Goal(
            f"this plugin's {kind} time over all resident plus missed bytes at the link's rate (worst size)",
            "<=",
            REACHED,
            over_the_bound(kind, contender, *parts),
        )
        for kind in ("decode", "prefill")
    )


IN_PLACE = "a step of {} in place over one from plain VRAM plus missed bytes at the link's rate (worst)"
ALIKE_IN_MODES = Goal("answers that are not those of the server without offloading", "<=", 0, other_in_modes)

GOALS: dict[str, tuple[Goal, ...]] = {
    "probe": (
        Goal("promotion over the copy engine", ">=", 0.8, promotion_rate),
        Goal("demotion over the copy engine, VRAM to host", ">=", 0.15, demotion_rate),
        Goal("replays that read other bytes while their expert moves", "<=", 0, wrong_replays),
    ),
    "ops": (
        Goal("replays that differ or are captured anew in 1,000 random moves", "<=", 0, replays_that_differ),
        Goal("VRAM used after a load off the prediction, in batches of 128 MiB", "<=", 1, used_after_load),
        Goal("copies that brought, or streamed layers that read, other bytes", "<=", 0, other_bytes),
        Goal("the copy engine's rate as a server measures it over that from pinned memory", ">=", 0.9, engine_at_start),
        Goal("seconds in which eight ranks measure their links, in turn and at once", "<=", 2, seconds_at_start),
        Goal("rows of a lookup table in host RAM that are read wrong", "<=", 0, other_table_rows),
        Goal("microseconds in which a step of 64 tokens reads its rows of such a table", "<=", 100, table_rows_of_a_step),
    ),
    "layer": (
        Goal("decode step, all resident in managed over plain memory (worst case)", "<=", 1.01, resident_step),
        Goal("routing counters' share of a step of 75 layers (worst case)", "<=", 0.01, counting),
    ),
    "server": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("server")),
        Goal("a server's decode time, 50 % resident over all (worst batch)", "<=", 1.25, served_decode(0.5)),
        Goal("a server's decode time, 78 % resident over all (worst batch)", "<=", 1.04, served_decode(0.78)),
        *reachable("frequency", *SERVED["server"]),
        Goal("a server's seconds of loading a GiB, with offloading over without (worst)", "<=", 1.1, loading),
    ),
    "default": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("default")),
        Goal("promotions after the traffic has changed", ">=", 1, promotions_after),
        *reachable("frequency", "fixed"),
    ),
    "modes": (ALIKE_IN_MODES,),
    "other_modes": (ALIKE_IN_MODES,),
    "serving_slots": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("serving_slots")),
        Goal(
            "a server's decode time, residents only over residents and slots on the same budget (least gain)",
            ">=",
            1,
            behind("frequency", "decode", 1, 4, 16, 64, ours="residents_and_slots", part="split"),
        ),
        Goal(
            "paged experts' decode time over this plugin's with slots, batch 1",
            ">=",
            1.3,
            behind("paged_experts", "decode", 1, ours="residents_and_slots", part="split"),
        ),
        Goal(
            "likewise, batch 16 and 64",
            ">=",
            2,
            behind("paged_experts", "decode", 16, 64, ours="residents_and_slots", part="split"),
        ),
        Goal(
            "paged experts' prefill time over this plugin's with slots",
            ">=",
            1.5,
            behind("paged_experts", "prefill", 4096, ours="residents_and_slots", part="split"),
        ),
        *reachable("residents_and_slots", "split"),
    ),
    "bounds": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("bounds")),
        Goal("a server's prefill time, read in place over streamed (least gain)", ">=", 1, streaming_gains),
    ),
    "peers": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("peers")),
        Goal(
            "paged experts' decode time over this plugin's, batch 1",
            ">=",
            1.3,
            behind("paged_experts", "decode", 1),
        ),
        Goal("likewise, batch 16 and 64", ">=", 2, behind("paged_experts", "decode", 16, 64)),
        Goal(
            "paged experts' prefill time over this plugin's",
            ">=",
            1.5,
            behind("paged_experts", "prefill", 512, 4096, 16384, 32000),
        ),
        Goal(
            "paged experts' decode time over this plugin's with slots (least gain)",
            ">=",
            1,
            behind("paged_experts", "decode", 1, 4, 16, 64, ours="residents_and_slots"),
        ),
        *reachable("frequency", "paged_experts"),
    ),
    "cpu_offload": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("cpu_offload")),
        Goal(
            "--cpu-offload-gb's decode time over this plugin's, batch 1",
            ">=",
            5,
            behind("cpu_offload_gb", "decode", 1),
        ),
    ),
    "offloader": (
        Goal("servers of this plugin with other answers", "<=", 0, other_answers("offloader")),
        Goal("OffloaderV2's decode time over this plugin's, batch 1", ">=", 5, behind("offloader_v2", "decode", 1)),
    ),
    "stream": (
        Goal("a streamed step over the longer of computing and copying, 2k to 32k tokens (worst)", "<=", 1.1, over_the_longer),
        Goal("a step read in place over one streamed, above the default threshold (worst)", ">=", 1, never_slower),
        Goal("likewise, 8192 tokens and 50 % resident", ">=", 3, gained),
        Goal("milliseconds of the launching thread that streaming adds a layer (worst)", "<=", 1, host_time),
        Goal("copy rate of a layer partly resident over one wholly offloaded (worst)", ">=", 0.9, partly_resident),
        Goal("rate of copies in VRAM beside a MoE over what the planner takes (worst, 95 % resident)", ">=", 1, in_vram),
        Goal("milliseconds of a copy of 2 MiB beside a kernel that fills the GPU (worst)", "<=", 1, starts_beside),
    ),
    "slots": (
        Goal("replays through slots with other outputs", "<=", 0, other_outputs),
        Goal("counts of hits and fills that are not the policy's", "<=", 0, other_decisions),
        Goal("fills that brought other bytes", "<=", 0, other_rows),
        Goal("resolving's share of a step of 75 MoE layers with nothing to fill (worst case)", "<=", 0.01, resolving),
        Goal("fills of 4 and more experts over the faster copy (worst)", ">=", 0.9, filling),
        Goal("read rate of slots over that of plain VRAM (worst)", ">=", 0.9, slots_in_vram),
        Goal("experts with other bytes in the stream buffers of a model with slots", "<=", 0, other_streams),
    ),
    "runners": (
        Goal("replays of SGLang's Marlin runner with other outputs", "<=", 0, other_runner_outputs("marlin")),
        Goal("replays of SGLang's DeepGEMM runner with other outputs", "<=", 0, other_runner_outputs("deep_gemm")),
        Goal("counts of their hits and fills that are others", "<=", 0, other_runner_counts),
        Goal(IN_PLACE.format("Marlin"), "<=", REACHED, in_place_over_the_bound("marlin", "in place")),
        Goal(IN_PLACE.format("DeepGEMM"), "<=", REACHED, in_place_over_the_bound("deep_gemm", "in place, expert 0 in VRAM")),
    ),
    "miss": (
        Goal("the MoE kernel's read of one expert over a copy's (worst)", ">=", 0.9, miss),
        Goal("zero-copy of one expert over the best zero-copy read", ">=", 0.9, zero_copy),
    ),
    "eviction": (Goal("MiB of residents taken for evicted while there was room", "<=", 0, false_alarms),),
}

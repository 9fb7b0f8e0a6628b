"""What the rows of a section say about the open decisions of the design: small tables of medians with their spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.rows import PartRows, Row, best, find, one, show

PREFER_CPU = "prefer CPU for all, prefetch both ways"
PREFER_GPU = "prefer GPU for residents"
READ_MOSTLY = "prefer CPU, ReadMostly to promote"
PREFETCH_FIRST = "prefetch, then prefer GPU"
DESIGNS = (PREFER_GPU, PREFER_CPU, READ_MOSTLY)


@dataclass(frozen=True)
class Decision:
    question: str
    figures: Callable[[PartRows], list[str]]

    def report(self, rows: PartRows) -> dict[str, Any]:
        return {"question": self.question, "figures": self.figures(rows) or ["no figures yet"]}


def cell(row: Row | None) -> str:
    if row is None:
        return "-"
    spread = f" ({row['low']:.4g}-{row['high']:.4g})" if len(row["values"]) > 1 else ""
    return f"{row['median']:.4g}{spread}"


def grid(head: Sequence[str], body: Sequence[tuple[str, Sequence[Row | None]]]) -> list[str]:
    """Aligned columns; lines without any figure are left out."""
    texts = [[name, *map(cell, cells)] for name, cells in body if any(cells)]
    if not texts:
        return []
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(words, widths, strict=True)).rstrip() for words in [head, *texts]
    ]


def residents_design(rows: PartRows) -> list[str]:
    def moves(design: str) -> list[Row | None]:
        steps = [one(rows, "demotion", "move", design=design, step=step) for step in ("promote", "demote")]
        states = ("promoted, second pass", "demoted, first pass", "demoted, second pass")
        return steps + [one(rows, "demotion", "read", design=design, step=state) for state in states]

    head = ["all experts", "promote, ms", "demote, ms", "read promoted, GB/s", "demoted, 1st pass", "2nd pass"]
    return grid(head, [(d, moves(d)) for d in DESIGNS])


def eviction_design(rows: PartRows) -> list[str]:
    figures = (
        "read, before",
        "read, under pressure, pass by pass",
        "read, pressure gone, pass by pass",
        "prefetching all residents again",
        "read, after prefetching again",
    )
    head = ["a plain allocation evicts", "read before, GB/s", "under pressure", "pressure gone", "cure, ms", "then"]
    body = [(d, [one(rows, "eviction", "eviction", design=d, figure=figure) for figure in figures]) for d in DESIGNS]
    return grid(head, body)


def demotion_design(rows: PartRows) -> list[str]:
    return grid(
        ["", "demote / promote", "VRAM taken by demoting, MiB"],
        [
            (
                design,
                [
                    one(rows, "demotion", "demote_over_promote", design=design),
                    one(rows, "demotion", "vram_taken_by_demotion", design=design),
                ],
            )
            for design in DESIGNS
        ],
    )


def calls_design(rows: PartRows) -> list[str]:
    def prefetches(calls: str) -> list[Row | None]:
        up: dict[str, str | float] = {"direction": "to_device", "calls": calls, "piece_mib": 16}
        return [
            one(rows, "prefetch", "prefetch", gpu="idle", **up),
            one(rows, "prefetch", "prefetch", gpu="busy", **up),
            one(rows, "prefetch", "prefetch", gpu="idle", **(up | {"direction": "to_host"})),
            one(rows, "prefetch", "prefetch_blocks_caller", gpu="idle", **up),
            one(rows, "prefetch", "prefetch_blocks_caller", gpu="queued", **up),
        ]

    def advice(ranges: int) -> list[Row | None]:
        calls = ("prefer, first time", "prefer, back", "prefer, all at once", "prefetch")
        return [one(rows, "advice", "advice", ranges=ranges, pages="on the host", call=call) for call in calls]

    def stall(design: str, thread: str, expert: str) -> list[Row | None]:
        figures = ("replay before", "slowest replay", "time lost to one promotion", "promoting calls")
        labels = {"design": design, "thread": thread, "expert": expert}
        return [one(rows, "stall", "stall", figure=figure, **labels) for figure in figures]

    def python(thread: str) -> list[Row | None]:
        figures = ("replay before", "slowest replay", "time lost to 16 promotions")
        return [*(one(rows, "extension", "extension_stall", figure=f, thread=thread) for f in figures), None]

    lines = grid(
        ["16 MiB pieces", "up, GB/s", "up, GPU busy", "down", "caller held, ms", "held, stream busy"],
        [(f"{calls} calls", prefetches(calls)) for calls in ("single", "coalesced", "batch")],
    )
    lines += grid(
        ["ranges on the host, us a call", "prefer", "prefer back", "all in one", "prefetch"],
        [(str(ranges), advice(ranges)) for ranges in (1, 16, 256, 1024, 4096)],
    )
    threads = [
        (f"{thread}, expert {expert}, {design}", stall(design, thread, expert))
        for expert in ("read by the graph", "not read")
        for design in (PREFER_GPU, PREFETCH_FIRST)
        for thread in ("scheduler", "helper")
    ]
    threads += [(f"{t}, 16 experts, through Python", python(t)) for t in ("scheduler", "helper")]
    return lines + grid(["one promotion from the thread, ms", "replay", "slowest", "lost", "calls"], threads)


def alignment_design(rows: PartRows) -> list[str]:
    def line(mib: float, stride: str) -> list[Row | None]:
        same: dict[str, str | float] = {"stride": stride, "expert_mib": mib}
        states = ("resident", "offloaded", "resident, after the moves", "offloaded, after the moves")
        reads = [one(rows, "alignment", "aligned_read", experts=e, **same) for e in states]
        moves = [one(rows, "alignment", "aligned_move", direction=d, **same) for d in ("to_device", "to_host")]
        rest = [one(rows, "alignment", figure, **same) for figure in ("vram_over_residents", "padding", "host_pages")]
        return reads + moves + rest

    sizes = sorted({row["expert_mib"] for row in find(rows.get("alignment", ()), "padding")})
    body = [(f"{mib:g} MiB, {stride}", line(mib, stride)) for mib in sizes for stride in ("packed", "padded to 2 MiB")]
    head = ["experts: read, GB/s", "resident", "offloaded", "resident, after moves", "offloaded, after moves"]
    lines = grid([*head, "up", "down", "VRAM / resident bytes", "x bytes", "host stretch, KiB"], body)
    figures = ("blocks of 2 MiB that are one stretch", "mean contiguous stretch")
    pages = [
        (memory, [one(rows, "bandwidth", "host_pages", memory=memory, figure=figure) for figure in figures])
        for memory in ("managed", "managed_4k", "pinned")
    ]
    return lines + grid(["host memory", "share of 2 MiB blocks in one stretch", "mean stretch, KiB"], pages)


def zero_copy_design(rows: PartRows) -> list[str]:
    body = []
    for memory in ("managed", "managed_4k", "pinned", "host_numa"):
        reads = find(rows.get("bandwidth", ()), "zero_copy", memory=memory)
        sizes = sorted({row["gib"] for row in reads})
        tops = [best([row for row in reads if row["gib"] == gib]) for gib in sizes]
        how = f"{tops[0]['load']}, {tops[0]['blocks_per_sm']:g} blocks/SM" if tops and tops[0] else ""
        body.append((f"{memory}: {how}", [*tops, None, None, None][:3]))
    body.append(("copy engine", [one(rows, "bandwidth", "copy_engine", direction="to_device"), None, None]))
    lines = grid(["read in place, GB/s", "1 GiB", "10 GiB", "24 GiB"], body)
    lines += by_loads(rows) + left_out(rows, "bandwidth")
    orders = [(mib, order) for mib in (1, 32) for order in ("side by side", "one after the other")]
    readers: list[tuple[str, list[Row | None]]] = []
    for count in (2, 8, 32):
        same: dict[str, str | float] = {"memory": "managed", "readers": count}
        cells = [one(rows, "amplification", "readers", order=order, mib=mib, **same) for mib, order in orders]
        readers.append((f"{count} readers", cells))
    return lines + grid(["x the time of one reader", *(f"{mib} MiB, {order}" for mib, order in orders)], readers)


def by_loads(rows: PartRows) -> list[str]:
    """Each way to read at its best number of blocks, of the smallest size."""
    reads = find(rows.get("bandwidth", ()), "zero_copy")
    memories = [*dict.fromkeys(row["memory"] for row in reads)]
    least = {memory: min(row["gib"] for row in reads if row["memory"] == memory) for memory in memories}

    def top(memory: str, load: str) -> Row | None:
        return best(find(reads, "zero_copy", memory=memory, load=load, gib=least[memory]))

    body = [(load, [top(memory, load) for memory in memories]) for load in dict.fromkeys(row["load"] for row in reads)]
    return grid(["best of 1 to 8 blocks/SM, GB/s", *memories], body)


def left_out(rows: PartRows, part: str) -> list[str]:
    found = [row for row in rows.get(part, ()) if row["row"] == "load_left_out"]
    return [f"{row['load']} of {row['memory']} memory is left out: {row['reason']}" for row in found]


def moving_design(rows: PartRows) -> list[str]:
    found = find(rows.get("stall_tma", ()), "stall_tma")
    figures = [*dict.fromkeys(row["figure"] for row in found)]

    def arm(load: str, move: str) -> list[Row | None]:
        return [one(rows, "stall_tma", "stall_tma", load=load, move=move, figure=figure) for figure in figures]

    arms = dict.fromkeys((row["load"], row["move"]) for row in found)
    lines = grid(
        ["the graph reads the moving expert, ms", *figures], [(f"{load}, {move}", arm(load, move)) for load, move in arms]
    )
    for row in find(found, "stall_tma", figure="replays that read other bytes"):
        if row["median"]:
            lines.append(f"WRONG BYTES in {row['median']:g} replays: {row['load']}, {row['move']}")
    return lines + left_out(rows, "stall_tma")


def numa_design(rows: PartRows) -> list[str]:
    lines = [f"the GPU's node: {row['median']:g}" for row in find(rows.get("numa", ()), "gpu_node")]
    asked = [*dict.fromkeys(row["prefers"] for row in find(rows.get("numa", ()), "numa"))]
    figures = ("advice accepted", "prefetch accepted", "zero-copy")
    body = [(place, [one(rows, "numa", "numa", prefers=place, figure=figure) for figure in figures]) for place in asked]
    lines += grid(["managed memory prefers", "advice accepted", "prefetch accepted", "zero-copy, GB/s"], body)
    names = [*dict.fromkeys(row["figure"] for row in rows.get("numa", ()) if row["row"] == "numa_attribute")]
    answers = [(p, [one(rows, "numa", "numa_attribute", prefers=p, figure=name) for name in names]) for p in asked]
    lines += grid(["the attributes answer", *names], answers)
    for row in find(rows.get("numa", ()), "numa_pages"):
        where = (
            f"on node {row['node']:g}"
            if row["node"] >= 0
            else f"at a place that the kernel does not tell (error {-row['node']:g})"
        )
        lines.append(f"{row['prefers']}: {row['median']:.0%} of its pages {where}")
    refused = [row for row in rows.get("numa", ()) if "reason" in row]
    return lines + [f"{row['prefers']}: {row['figure']}: {row['reason']}" for row in refused]


def swap_design(rows: PartRows) -> list[str]:
    found = find(rows.get("swap", ()), "swap")
    sizes = sorted({row["expert_mib"] for row in found})
    figures = [*dict.fromkeys(row["figure"] for row in found)]
    body = [(figure, [one(rows, "swap", "swap", expert_mib=mib, figure=figure) for mib in sizes]) for figure in figures]
    return grid(["on a full card: GB/s, MiB, ms", *(f"experts of {mib:g} MiB" for mib in sizes)], body)


def churn_design(rows: PartRows) -> list[str]:
    found = find(rows.get("churn", ()), "churn")
    arms = [*dict.fromkeys(row["moves"] for row in found)]
    figures = [*dict.fromkeys(row["figure"] for row in found)]
    body = [(figure, [one(rows, "churn", "churn", moves=arm, figure=figure) for arm in arms]) for figure in figures]
    return grid(["on a full card, after 6 re-selections", *arms], body)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


FAULT = 10
"""A first read that takes as many times a read of plain VRAM is called a fault, as by the plugin (``cuda/read_times``)."""


def look_design(rows: PartRows) -> list[str]:
    """Cycles of two reads of each block under pressure."""
    lines = []
    for row in find(rows.get("eviction", ()), "look"):
        spread = ", ".join(f"{share:.0%} {quantile(row['values'], share):g}" for share in (0, 0.05, 0.5, 0.9, 0.95, 1))
        lines.append(f"{row['memory']}, {row['read']} read, cycles ({row['design']}): {spread}")
    for design in DESIGNS:
        first, second = (
            one(rows, "eviction", "look", design=design, memory="residents", read=read) for read in ("first", "second")
        )
        vram = one(rows, "eviction", "look", design=design, memory="plain VRAM", read="second")
        if first and second and vram:
            slow = [then for now, then in zip(first["values"], second["values"], strict=True) if now > FAULT * vram["median"]]
            then = f", whose second read takes {quantile(slow, 0):g} to {quantile(slow, 1):g}" if slow else ""
            lines.append(f"{design}: {len(slow)} of {len(first['values'])} first reads were faults{then}")
    return lines


def headroom_design(rows: PartRows) -> list[str]:
    figures = (
        "free VRAM before the allocation that evicted first",
        "residents evicted, by the latency check",
        "free VRAM under pressure",
    )
    found = [(f, one(rows, "eviction", "eviction", design=PREFER_CPU, figure=f)) for f in figures]
    return [f"{name}: {show(row)}" for name, row in found if row]


def noticing_design(rows: PartRows) -> list[str]:
    return [f"{row['figure']}: {show(row)}" for row in find(rows.get("noticing", ()), "noticing")]


def residency_design(rows: PartRows) -> list[str]:
    found = []
    for blocks in ("resident", "offloaded"):
        found.append((f"one read, {blocks} (quantiles)", one(rows, "residency", "read_latency", blocks=blocks)))
    for figure in ("told right", "one check"):
        found.append((f"residency check, {figure}", one(rows, "residency", "residency_check", figure=figure)))
    return [f"{name}: {show(row)}" for name, row in found if row]


def copies_design(rows: PartRows) -> list[str]:
    lines = []
    for gpu in ("idle", "busy"):
        found = [row for row in find(rows.get("copies", ()), "copies") if row["gpu"] == gpu]
        sources = [*dict.fromkeys(row["source"] for row in found)]
        ways = [*dict.fromkeys(row["way"] for row in found)]

        def line(way: str, gpu: str = gpu, sources: list[str] = sources) -> list[Row | None]:
            same = {"way": way, "gpu": gpu}
            rates = [one(rows, "copies", "copies", source=source, **same) for source in sources]
            beside = "copies_slow_others" if gpu == "busy" else "copies_hold_caller"
            return [*rates, one(rows, "copies", beside, source=sources[0], **same)]

        last = "x the time of a kernel beside" if gpu == "busy" else "caller held, ms"
        lines += grid([f"into VRAM, GPU {gpu}, GB/s", *sources, last], [(way, line(way)) for way in ways])
    return lines


def rates_design(rows: PartRows) -> list[str]:
    """Copies of whole layers: GB/s of their offloaded bytes, and the share of its time that the other work loses meanwhile."""
    found = find(rows.get("rates", ()), "layer_copy")
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in found):
        shares = sorted({row["resident"] for row in found if row["shape"] == shape})
        besides = [*dict.fromkeys(row["beside"] for row in found if row["shape"] == shape)]
        for figure, head in (
            ("layer_copy", "offloaded bytes, GB/s"),
            ("layer_copy_slows", "the other's loss, of the copy's time"),
        ):
            body = []
            for beside in besides:
                cells = [one(rows, "rates", figure, shape=shape, beside=beside, resident=share) for share in shares]
                short = one(rows, "rates", "short_copy", shape=shape, beside=beside) if figure == "layer_copy" else None
                body.append((beside, [*cells, short]))
            lines += grid([f"{shape}: {head}", *(f"{share:.0%} resident" for share in shares), "2 MiB, ms"], body)
    return lines


def steps_design(rows: PartRows) -> list[str]:
    found = find(rows.get("steps", ()), "step")
    lines = []
    for share in dict.fromkeys(row["resident"] for row in found):
        tokens = sorted({row["tokens"] for row in found if row["resident"] == share})
        arms = [*dict.fromkeys(row["arm"] for row in found)]
        body = [(arm, [one(rows, "steps", "step", arm=arm, tokens=size, resident=share) for size in tokens]) for arm in arms]
        for count in (2, 1):
            same: dict[str, str | float] = {"buffers": count, "resident": share}
            held = [one(rows, "steps", "host_time", tokens=size, **same) for size in tokens]
            body.append((f"launching thread, {count} buffer{'s' * (count > 1)}", held))
        lines += grid([f"{share:.0%} resident, ms a layer", *(f"{size:g} tokens" for size in tokens)], body)
    return lines


def miss_design(rows: PartRows) -> list[str]:
    found = find(rows.get("pages", ()), "miss")
    sources = [*dict.fromkeys((row["shape"], row["memory"]) for row in found)]

    def line(way: str) -> list[Row | None]:
        return [one(rows, "pages", "miss", shape=shape, memory=memory, way=way) for shape, memory in sources]

    body = [(way, line(way)) for way in dict.fromkeys(row["way"] for row in found)]
    stretches = [one(rows, "pages", "host_stretch", shape=shape, memory=memory) for shape, memory in sources]
    body.append(("mean stretch of host memory, KiB", stretches))
    lines = grid(["one expert, GB/s", *(f"{shape}, {memory}" for shape, memory in sources)], body)
    reads, engine = find(rows.get("link", ()), "zero_copy"), one(rows, "link", "copy_engine", direction="to_device")
    for memory in ("managed", "pinned"):
        top = best([row for row in reads if row["memory"] == memory])
        lines += [f"1 GiB of {memory} memory, the best read ({top['load']}): {show(top)}"] if top else []
    return lines + ([f"copy engine from pinned memory: {show(engine)}"] if engine else [])


def accounting_notes(rows: PartRows) -> list[str]:
    lines = []
    for after in ("populate half in VRAM", "promote a quarter", "demote half", "promote it again", "free"):
        found = one(rows, "accounting", "vram_taken", after=after, repeat=0)
        if found:
            lines.append(f"after {after}: {show(found)} taken, {found['expected_mib']:g} MiB resident")
    for row in find(rows.get("advice", ()), "copy_into_managed", figure="VRAM taken"):
        lines.append(f"copy from {row['source']} into {row['pages']} prefer-CPU pages: {show(row)} of VRAM taken")
    flows = ("written on the host, then promoted", "prefetched to VRAM before written")
    moments = ("allocate", "prefetch", "write by the GPU", "promote", "demote", "promote again", "free")
    figure = "taken, by MemAvailable"
    body = [(f, [one(rows, "host_memory", "host_memory", flow=f, after=a, figure=figure) for a in moments]) for f in flows]
    return lines + grid(["host RAM taken, MiB", *moments], body)


def break_even_curve(rows: PartRows) -> list[str]:
    lines = []
    found = find(rows.get("break_even", ()), "one_expert")
    for shape in dict.fromkeys(row["shape"] for row in found):
        body: list[tuple[str, list[Row | None]]] = []
        for tokens in sorted({row["tokens"] for row in found if row["shape"] == shape}):
            here = [row for row in found if (row["shape"], row["tokens"]) == (shape, tokens)]
            arms = [[row for row in here if row["arm"] == arm] for arm in ("resident", "zero-copy", "copy in first")]
            fastest = [min(arm, key=lambda row: row["median"]) for arm in arms]
            rate = best(find(rows["break_even"], "zero_copy", shape=shape, tokens=tokens))
            body.append((f"{tokens:g} tokens, best {fastest[1]['tiles']}", [*fastest, rate]))
        lines += grid([shape, "resident, ms", "zero-copy", "copy in first", "zero-copy, GB/s"], body)
        copied = one(rows, "break_even", "copy_in", shape=shape)
        lines += [f"{shape}, copying one expert in: {show(copied)}"] if copied else []
    return lines


def residency_cost(rows: PartRows) -> list[str]:
    body: list[tuple[str, list[Row | None]]] = []
    for part in ("glm-4.5-air", "deepseek-v3", "glm-5"):
        for plain in find(rows.get(part, ()), "decode", arm="plain"):
            same = {name: plain[name] for name in ("shape", "weights", "batch")}
            managed = [one(rows, part, "decode", arm="managed", resident=share, **same) for share in (1.0, 0.78, 0.5)]
            body.append((" ".join(map(str, same.values())), [plain, *managed]))
    return grid(["step, ms (layers: see JSON)", "plain", "managed, all", "78 % resident", "50 %"], body)


def counting_design(rows: PartRows) -> list[str]:
    """A line by batch: the step without counters, and what each way to count adds."""
    ways = ("on a stream beside", "by one warp")
    body: list[tuple[str, list[Row | None]]] = []
    for plain in find(rows.get("counters", ()), "counted_step", counters="without"):
        same = {name: plain[name] for name in ("batch", "layers")}
        others = [one(rows, "counters", "other_counters_share", counters=way, **same) for way in ways]
        body.append((f"batch {same['batch']}", [plain, one(rows, "counters", "counters_share", **same), *others]))
    return grid(["counters' share of a step", "without, ms", "as they are", *ways], body)


def modes(rows: PartRows) -> list[str]:
    """What offloading did in each mode, and how many answers were alike."""
    lines = []
    for part in rows:
        for same in find(rows[part], "same_answers"):
            alike = f"{same['values'].count(1.0)} of {len(same['values'])} answers alike"
            amounts = [(name, one(rows, part, f"{name}_bytes")) for name in ("offloaded", "zero_copy", "streamed", "moved")]
            lines.append(f"{part}: {alike}; " + ", ".join(f"{name} {show(row)}" for name, row in amounts if row is not None))
    return lines


def promises(rows: PartRows) -> list[str]:
    lines = [f"{len(find(rows.get('contract', ()), 'promise'))} promises of Memory kept"]
    for figure, what in (("counts_wrong", "counters in a graph"), ("asked_counts_wrong", "counts asked for between replays")):
        wrong = find(rows.get("counters", ()), figure)
        if wrong:
            lines.append(f"{what}: {sum(row['median'] for row in wrong):g} wrong counts in {len(wrong)} settings")
    for row in find(rows.get("identity", ()), "identity"):
        lines.append(f"bytes kept through {show(row)} of random moves of {row['gib']:.3g} GiB")
    for row in find(rows.get("copies", ()), "copies_wrong"):
        moved = f" ({row['moved_gb']:.3g} GB moved meanwhile)" if "moved_gb" in row else ""
        lines.append(f"{row['what']}: {row['median']:g} wrong of {row['done']:g}{moved}")
    for row in find(rows.get("load", ()), "load", repeat=0):
        lines.append(f"load, {row['figure']}: {show(row)}")
    return lines


def moe_is_right(rows: PartRows) -> list[str]:
    return [
        f"Triton MoE, {row['weights']}, {row['tokens']} tokens: {show(row)} error against torch"
        for row in find(rows.get("check", ()), "moe_error")
    ]


def resolve_design(rows: PartRows) -> list[str]:
    found = find(rows.get("empty", ()), "resolve")
    body: list[tuple[str, list[Row | None]]] = []
    for slots, batch in dict.fromkeys((row["slots"], row["batch"]) for row in found):
        same: dict[str, str | float] = {"slots": slots, "batch": batch}
        costs = [one(rows, "empty", "resolve", how=how, **same) for how in ("alone", "beside the MoE")]
        rest = [one(rows, "empty", figure, **same) for figure in ("resolve_share", "begin_slots")]
        body.append((f"{slots} slots, batch {batch}", [*costs, *rest]))
    return grid(["nothing to fill", "alone, us a layer", "beside the MoE", "share of the step", "step begins, ms"], body)


def fill_design(rows: PartRows) -> list[str]:
    found = find(rows.get("fill", ()), "fill")
    ways = [*dict.fromkeys(row["way"] for row in found)]
    body: list[tuple[str, list[Row | None]]] = []
    for mib, fills in dict.fromkeys((row["expert_mib"], row["fills"]) for row in found):
        rates = [one(rows, "fill", "fill", way=way, expert_mib=mib, fills=fills) for way in ways]
        body.append(
            (f"{fills} of {mib:g} MiB", [*rates, one(rows, "fill", "fill_time", way="slots", expert_mib=mib, fills=fills)])
        )
    lines = grid(["fills of a layer, GB/s", *ways, "slots, ms"], body)
    for row in find(rows.get("fill", ()), "fill_beside"):
        lines.append(f"{row['fills']} fills beside a kernel with more blocks than the GPU holds: {show(row)}")
    return lines


def slot_steps(rows: PartRows) -> list[str]:
    """A line by weights, share of the experts' bytes in VRAM, batch and split."""
    body: list[tuple[str, list[Row | None]]] = []
    found = find(rows.get("layer", ()), "slot_step")
    for step in sorted(found, key=lambda row: (row["weights"], row["share"], row["batch"])):
        held = {name: step[name] for name in ("weights", "share", "split")}
        figures = ("resident", "hits", "fills", "read in place")
        use = [one(rows, "layer", "slot_use", figure=figure, batch=step["batch"], **held) for figure in figures]
        name = f"{step['weights']}, {step['share']:.0%} in VRAM, batch {step['batch']}, {step['split']}"
        body.append((name, [step, one(rows, "layer", "slot_vram", **held), *use]))
    lines = grid(
        ["a decode step", "ms", "VRAM, GB", "of its activations: resident", "in slots", "fills", "read in place"], body
    )
    return lines + [f"computed by {kernels}" for kernels in dict.fromkeys(row["kernels"] for row in found)]


def slots_right(rows: PartRows) -> list[str]:
    """A flag that is on by default waits for this."""
    lines = []
    for part, name, what in (
        ("layer", "slot_bits", "replays with other outputs than from plain VRAM"),
        ("layer", "slot_counts", "counts of hits, fills and kept experts that are not the policy's"),
        ("fill", "fill_wrong", "fills with other bytes than their experts"),
        ("layer", "slot_stream", "experts with other bytes in stream buffers, which take from slots"),
    ):
        if found := find(rows.get(part, ()), name):
            lines.append(f"{what}: {sum(row['median'] for row in found):g}, in {len(found)} settings")
    return lines


RUNNERS = ("marlin", "deep_gemm")


def runners_right(rows: PartRows) -> list[str]:
    """A line by runner and place."""
    lines = []
    found = [row for part in RUNNERS for row in find(rows.get(part, ()), "function_bits")]
    for name, where in dict.fromkeys((row["function"], row["where"]) for row in found):
        mine = [row for row in found if (row["function"], row["where"]) == (name, where)]
        differ, done = (sum(row[figure] for row in mine) for figure in ("median", "done"))
        lines.append(f"{name}, {where}: {differ:g} of {done} replays with other outputs, by {mine[0]['kernels']}")
    return lines


def runner_steps(rows: PartRows) -> list[str]:
    """A line by runner and batch. In place, all that tokens choose is in host RAM, and in slots all of it is there."""
    places = ("plain", "in place", "in place, expert 0 in VRAM", "slots")
    body: list[tuple[str, list[Row | None]]] = []
    for part in RUNNERS:
        found = find(rows.get(part, ()), "function_step")
        for name, batch in dict.fromkeys((row["function"], row["batch"]) for row in found):
            steps = [one(rows, part, "function_step", where=where, function=name, batch=batch) for where in places]
            missed = max(row["missed_gb"] for row in found if (row["function"], row["batch"]) == (name, batch))
            body.append((f"{name}, batch {batch}, {missed:.3g} GB missed", steps))
    return grid(["a step of one layer, ms", *places], body)


def served(part: str) -> Callable[[PartRows], list[str]]:
    """What each server of a part needed, and why one failed."""

    def figures(rows: PartRows) -> list[str]:
        cells = [row["cell"] for row in rows.get(part, ()) if row["row"] == "cell"]
        lines = []
        for kind, label in (("decode", "batch"), ("prefill", "tokens")):
            sizes = sorted({row[label] for row in rows.get(part, ()) if row["row"] == kind})
            body: list[tuple[str, list[Row | None]]] = []
            for cell in cells:
                own: dict[str, str | float] = {"contender": cell["contender"], "resident": cell["residency"]}
                found = [one(rows, part, kind, **own, **{label: size}) for size in sizes]
                body.append((f"{cell['contender']} {cell['residency']:.0%}", found))
            lines += grid([f"{kind}, ms", *(f"{label} {size}" for size in sizes)], body)
        for cell in [cell for cell in cells if "offload" in cell]:
            streamed, read = (cell["offload"][name] / 1e9 for name in ("streamed_bytes", "zero_copy_bytes"))
            lines.append(
                f"{cell['contender']} {cell['residency']:.0%}: {streamed:.4g} GB streamed, {read:.4g} GB read in place"
            )
        return lines + [f"{cell['contender']} {cell['residency']:.0%}: {cell['error']}" for cell in cells if cell["error"]]

    return figures


def engines(*parts: str) -> Callable[[PartRows], list[str]]:
    """What SGLang chose for each server, and which of the batches in its log ran as graphs."""

    def figures(rows: PartRows) -> list[str]:
        lines = []
        for part in parts:
            for cell in [row["cell"] for row in rows.get(part, ()) if row["row"] == "cell" and "engine" in row["cell"]]:
                engine = cell["engine"]
                seen = [f"{phase} {n['graph']} of {n['graph'] + n['eager']}" for phase, n in engine["batches"].items()]
                lines.append(
                    f"{part}: {cell['contender']}: attention {engine['attention_backend']}, experts "
                    f"{engine['moe_runner_backend']}, {len(engine['decode_graph_batches'])} decode graphs; logged batches that "
                    f"ran as graphs: {', '.join(seen)}"
                )
        return lines

    return figures


def traffic(*parts: str) -> Callable[[PartRows], list[str]]:
    """Each server before and after its traffic changed: the medians of the rounds, and all promotions."""

    def figures(rows: PartRows) -> list[str]:
        body: list[tuple[str, list[Row | None]]] = []
        for part in parts:
            for found in find(rows.get(part, ()), "traffic"):
                own = {name: found[name] for name in ("contender", "resident", "topic")}
                rest = [one(rows, part, name, **own) for name in ("promotions", "moved", "hit_rate")]
                body.append((f"{part}: {found['contender']} {found['resident']:.0%}, {found['topic']}", [found, *rest]))
        return grid(["by round", "ms", "promotions", "moved, GB", "hit rate"], body)

    return figures


def slots_served(part: str) -> Callable[[PartRows], list[str]]:
    """A line by server and batch: where its decode steps found their offloaded experts."""

    def figures(rows: PartRows) -> list[str]:
        names = {"hits": "in slots", "fills": "fills", "bypasses": "read in place"}
        body: list[tuple[str, list[Row | None]]] = []
        found = find(rows.get(part, ()), "slots_use", figure="hits")
        for hits in found:
            own = {name: hits[name] for name in ("contender", "resident", "batch")}
            uses = [one(rows, part, "slots_use", figure=figure, **own) for figure in names]
            body.append((f"{own['contender']} {own['resident']:.0%}, batch {own['batch']}", uses))
        lines = grid(["of offloaded activations", *names.values()], body)
        for filled in find(rows.get(part, ()), "slots_filled"):
            own = {name: filled[name] for name in ("contender", "resident")}
            kept = one(rows, part, "slots_all", figure="kept", **own)
            lines.append(f"{own['contender']}: {show(filled)} filled, {show(kept) if kept else '-'} kept of streamed prompts")
        return lines

    return figures


DECISIONS: dict[str, tuple[Decision, ...]] = {
    "probe": (
        Decision("PREFER_GPU residents, or prefer CPU for all and residency by prefetch", residents_design),
        Decision("ReadMostly to promote and Unset to demote, or plain prefetch", demotion_design),
        Decision("one range at a time, coalesced or batched; which thread; what a replay suffers", calls_design),
        Decision("experts aligned to 2 MiB or packed; which host page size comes out", alignment_design),
        Decision("which memory and load read zero-copy fastest", zero_copy_design),
        Decision("what a graph reads by bulk copies and tensor maps while its expert moves", moving_design),
        Decision("whether host pages lie on the NUMA node that is asked for, and what it is worth", numa_design),
        Decision("whether the latency of a read shows where a page is", residency_design),
        Decision("what the driver reports as free, what host RAM is held", accounting_notes),
    ),
    "stream": (
        Decision("streaming or reading in place, by tokens; one buffer or two", steps_design),
        Decision("how fast a layer's offloaded bytes come, and what other work loses", rates_design),
        Decision("offloaded bytes into VRAM: copy engine or kernel, and what other kernels notice", copies_design),
    ),
    "slots": (
        Decision("whether slots may be on: what is computed through them, what they hold, and how they decide", slots_right),
        Decision("what slots cost a step that fills nothing", resolve_design),
        Decision("whether misses may be brought by the kernel that resolves them", fill_design),
        Decision("residents, slots or both in the same VRAM", slot_steps),
    ),
    "runners": (
        Decision("whether SGLang's other MoE runners compute the same from managed memory and from slots", runners_right),
        Decision("what their steps cost in place and out of slots, and what padding reads of expert 0", runner_steps),
    ),
    "miss": (Decision("whether a decode step's miss uses the link fully, by host memory", miss_design),),
    "ops": (Decision("whether the promises hold on the device", promises),),
    "layer": (
        Decision("whether the Triton MoE is right", moe_is_right),
        Decision("zero-copy or copy in first, by tokens and block shape", break_even_curve),
        Decision("what a step costs by residency", residency_cost),
        Decision("whether the routing is counted in the step's stream, beside it, or by fewer threads", counting_design),
    ),
    "server": (
        Decision("what a server's answer costs, half of the experts resident", served("frequency")),
        Decision("what a server's answer costs, most of them resident", served("most")),
    ),
    "default": (
        Decision("what an answer costs with SGLang's own graphs, residents that follow the traffic", served("continuous")),
        Decision("what an answer costs with SGLang's own graphs, residents chosen once", served("fixed")),
        Decision("what SGLang chose for itself", engines("continuous", "fixed")),
        Decision("whether residents follow traffic that changes, and what that gains", traffic("continuous", "fixed")),
    ),
    "modes": (Decision("what is served besides", modes),),
    "other_modes": (Decision("what is served besides", modes),),
    "serving_slots": (
        Decision("residents, slots or both in the same VRAM of a whole server", served("split")),
        Decision("what a server's slots serve", slots_served("split")),
    ),
    "peers_slots": (
        Decision("this plugin with slots or paged experts", served("paged_slots")),
        Decision("what the slots serve", slots_served("paged_slots")),
    ),
    "bounds": (
        Decision("what streaming, and choosing residents by use, gain a server", served("first_n")),
        Decision("what a server without any resident costs", served("bounds")),
    ),
    "peers": (Decision("this plugin or paged experts", served("paged_experts")),),
    "cpu_offload": (Decision("this plugin or --cpu-offload-gb", served("cpu_offload_gb")),),
    "offloader": (Decision("this plugin or OffloaderV2", served("offloader_v2")),),
    "eviction": (
        Decision("whether residents can change on a full card", swap_design),
        Decision("whether residents stay through re-selections, by experts' own bytes or by whole blocks", churn_design),
        Decision("PREFER_GPU residents, or prefer CPU for all, where something else fills the card", eviction_design),
        Decision("which headroom keeps residents", headroom_design),
        Decision("whether this plugin notices evicted residents", noticing_design),
        Decision("what two reads tell of a block: in VRAM, brought back by the first, or read in place", look_design),
    ),
}

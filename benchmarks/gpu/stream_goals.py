"""What streaming must reach, from rows of the parts ``rates`` and ``steps``; and whether the MoE kernel reads misses at the
link's rate. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.link_bound import link_rate
from benchmarks.gpu.rows import PartRows, Row, best, find, one, show
from sglang_uvm_offload.memory.staging import VRAM_BLOCKS
from sglang_uvm_offload.sizing.inputs import Assumptions

Ratio = tuple[float, str]

STREAMED = "streamed, 2 buffers"


def long_steps(rows: PartRows, tokens: int) -> Iterator[tuple[Row, dict[str, str | float]]]:
    """Steps of so many tokens or more that stream through two buffers, each with the labels of its size."""
    for row in find(rows.get("steps", ()), "step", arm=STREAMED):
        if row["tokens"] >= tokens:
            yield row, {"tokens": row["tokens"], "resident": row["resident"]}


def words(size: dict[str, str | float]) -> str:
    return f"{size['tokens']:g} tokens, {size['resident']:.0%} resident"


def over_the_longer(rows: PartRows) -> Ratio | None:
    """The worst ratio, of 2048 tokens or more, to the longer of computing from VRAM and copying at the idle GPU's rate."""
    found = []
    for streamed, size in long_steps(rows, 2048):
        share = size["resident"]
        computed = one(rows, "steps", "step", arm="resident", **size)
        offloaded = one(rows, "steps", "offloaded", resident=share)
        if not computed or not offloaded:
            return None
        labels = {"shape": offloaded["shape"], "resident": share, "beside": "nothing", "vram_blocks": VRAM_BLOCKS}
        rate = one(rows, "rates", "layer_copy", **labels)
        if not rate or not rate["median"]:
            return None
        copying = 1e3 * offloaded["median"] / rate["median"]
        least = max(computed["median"], copying)
        if not least:
            return None
        text = f"{words(size)}: {show(streamed)}; from VRAM {computed['median']:.4g}, copying {copying:.4g}"
        found.append((streamed["median"] / least, text))
    return max(found, default=None)


def in_place_over_streamed(rows: PartRows, tokens: int, exactly: float | None = None) -> list[Ratio]:
    found = []
    for streamed, size in long_steps(rows, tokens):
        read = one(rows, "steps", "step", arm="in place", **size)
        if read and streamed["median"] and exactly in (None, size["resident"]):
            found.append(
                (read["median"] / streamed["median"], f"{words(size)}: in place {show(read)}, streamed {show(streamed)}")
            )
    return found


def gained(rows: PartRows) -> Ratio | None:
    """At 8192 tokens and half resident."""
    return min((each for each in in_place_over_streamed(rows, 8192, 0.5) if each[1].startswith("8192 ")), default=None)


def never_slower(rows: PartRows) -> Ratio | None:
    """The least gain of a step with more tokens than those from which on a server streams by default."""
    thresholds = [row["threshold"] for row in find(rows.get("steps", ()), "step")]
    return min(in_place_over_streamed(rows, thresholds[0] + 1), default=None) if thresholds else None


def host_time(rows: PartRows) -> Ratio | None:
    worst = best(find(rows.get("steps", ()), "host_time"))
    return (worst["median"], f"{worst['tokens']:g} tokens, {worst['buffers']:g} buffers: {show(worst)}") if worst else None


def partly_resident(rows: PartRows) -> Ratio | None:
    """The worst rate of offloaded bytes of a layer 50 to 90 % resident over that of one that is wholly offloaded, alone and
    beside the same kernel."""
    found = []
    for share in (0.5, 0.78, 0.9):
        for whole in find(rows.get("rates", ()), "layer_copy", resident=0.0):
            same: dict[str, str | float] = {name: whole[name] for name in ("shape", "beside", "vram_blocks")}
            part = one(rows, "rates", "layer_copy", resident=share, **same)
            if part and whole["median"]:
                text = f"{same['shape']}, beside {same['beside']}, {share:.0%} resident: {show(part)}, none {show(whole)}"
                found.append((part["median"] / whole["median"], text))
    return min(found, default=None)


def in_vram(rows: PartRows) -> Ratio | None:
    """The least rate of resident bytes of a layer that is 95 % resident beside a MoE, over what the planner takes."""
    found = find(rows.get("rates", ()), "layer_copy_vram", resident=0.95, vram_blocks=VRAM_BLOCKS)
    beside = [(row["median"] / Assumptions.vram_copy_gbps, row) for row in found if row["beside"].startswith("the MoE")]
    if not beside:
        return None
    ratio, row = min(beside, key=lambda each: each[0])
    return ratio, f"{row['shape']}, beside {row['beside']}: {show(row)}"


def starts_beside(rows: PartRows) -> Ratio | None:
    """The longest time of a copy of 2 MiB that begins while another kernel has more blocks than the GPU holds."""
    found = [row for row in find(rows.get("rates", ()), "short_copy") if row["beside"] != "nothing"]
    worst = best(found)
    return (worst["median"], f"{worst['shape']}, beside {worst['beside']}: {show(worst)}") if worst else None


def other_bytes(rows: PartRows) -> Ratio | None:
    found = find(rows.get("copies", ()), "copies_wrong")
    return (sum(row["median"] for row in found), f"{sum(row['done'] for row in found):g} compared") if found else None


def miss(rows: PartRows) -> Ratio | None:
    """The worst model and host memory: the MoE kernel's best block shape over the faster of the two copies."""
    found = []
    for shape, memory in dict.fromkeys((row["shape"], row["memory"]) for row in find(rows.get("pages", ()), "miss")):
        here = find(rows["pages"], "miss", shape=shape, memory=memory)
        kernel = best([row for row in here if row["way"].startswith("MoE kernel")])
        copy = best([row for row in here if row["way"].startswith("copy")])
        if kernel and copy and copy["median"]:
            text = f"{shape}, {memory}: {kernel['way']}: {show(kernel)}; {copy['way']} {show(copy)}"
            found.append((kernel["median"] / copy["median"], text))
    return min(found, default=None)


def zero_copy(rows: PartRows) -> Ratio | None:
    """The best block shape of the MoE kernel, out of managed memory, over the best zero-copy read."""
    ceiling, read = link_rate(rows), find(rows.get("pages", ()), "miss", memory="managed")
    found = best([row for row in read if row["way"].startswith("MoE kernel")])
    if not ceiling or not found:
        return None
    words = f"{found['shape']}, {found['way']}: {show(found)}; {ceiling['memory']} {show(ceiling)}"
    return found["median"] / ceiling["median"], words

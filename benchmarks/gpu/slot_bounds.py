"""Goals of the slots: ratios taken from rows, each with what it was taken from, or None where rows are missing. Pure."""

from __future__ import annotations

from benchmarks.gpu.rows import PartRows, best, find, show

Ratio = tuple[float, str]


def other_outputs(rows: PartRows) -> Ratio | None:
    """Replays through slots whose output is not that of a layer in plain VRAM."""
    found = find(rows.get("layer", ()), "slot_bits")
    kernels = " and ".join(dict.fromkeys(row["kernels"] for row in found))
    return (sum(row["median"] for row in found), f"{sum(row['done'] for row in found)} replays of {kernels}") if found else None


def other_decisions(rows: PartRows) -> Ratio | None:
    """Counts of hits, fills, and experts kept after a prefill, by expert, that are not the policy's."""
    found = find(rows.get("layer", ()), "slot_counts")
    hits, fills, kept = (sum(row[name] for row in found) for name in ("hits", "fills", "kept"))
    return (sum(row["median"] for row in found), f"{hits} hits, {fills} fills, {kept} kept") if found else None


def other_rows(rows: PartRows) -> Ratio | None:
    """Fills that brought other bytes."""
    found = find(rows.get("fill", ()), "fill_wrong")
    return (sum(row["median"] for row in found), f"{sum(row['done'] for row in found)} fills") if found else None


def other_streams(rows: PartRows) -> Ratio | None:
    """Experts whose bytes in a stream buffer, copied from slots or over the link, are not their own."""
    found = find(rows.get("layer", ()), "slot_stream")
    done, slots = (sum(row[name] for row in found) for name in ("done", "from_slots"))
    return (sum(row["median"] for row in found), f"{done} experts; {slots} matrices only in slots") if found else None


def resolving(rows: PartRows) -> Ratio | None:
    """The worst share of a step of MoE layers."""
    worst = best(find(rows.get("empty", ()), "resolve_share"))
    return (worst["median"], f"{worst['slots']} slots, batch {worst['batch']}: {show(worst)}") if worst else None


FEWEST_FILLS = 4
"""Of a layer, from which on their rate is judged: one small expert is over before the link is full, whatever copies it."""


def filling(rows: PartRows) -> Ratio | None:
    """The worst number and size of experts: into slots over the faster of the two copies."""
    found = []
    for slots in find(rows.get("fill", ()), "fill", way="slots"):
        same = {name: slots[name] for name in ("fills", "expert_mib")}
        copy = best([row for row in find(rows["fill"], "fill", **same) if row["way"].startswith("copy")])
        if copy and copy["median"] and slots["fills"] >= FEWEST_FILLS:
            words = f"{same['fills']} of {same['expert_mib']:g} MiB: {show(slots)}; {copy['way']} {show(copy)}"
            found.append((slots["median"] / copy["median"], words))
    return min(found, default=None)


def slots_in_vram(rows: PartRows) -> Ratio | None:
    """The worst size of experts: the read rate of slots over that of plain VRAM."""
    found = []
    for slots in find(rows.get("fill", ()), "slot_read", what="slots"):
        plain = best(find(rows["fill"], "slot_read", what="plain VRAM", expert_mib=slots["expert_mib"]))
        if plain and plain["median"]:
            words = f"slots of {slots['expert_mib']:g} MiB: {show(slots)}; plain VRAM {show(plain)}"
            found.append((slots["median"] / plain["median"], words))
    return min(found, default=None)

"""The names by which a status and a report tell ranks apart."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict

from sglang_uvm_offload.residency.status import RankId, RankStatus


def names_of(ranks: Sequence[RankStatus]) -> list[str]:
    """The parts of each rank's id that tell it from others: "tp1", or "dp0 tp1"."""
    columns = {kind: [asdict(each.rank)[kind] for each in ranks] for kind in RankId.__struct_fields__}
    used = {kind: column for kind, column in columns.items() if len(set(column)) > 1}
    if used.get("ep") == used.get("tp"):
        used.pop("ep", None)
    used = used or {"tp": columns["tp"]}
    return [" ".join(f"{kind}{column[index]}" for kind, column in used.items()) for index in range(len(ranks))]

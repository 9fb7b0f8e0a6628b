"""A report's input: a server's statistics or a replay's results, as records that are checked when they are decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from sglang_uvm_offload.replay.results import Replay, Scope
from sglang_uvm_offload.report.rank_names import names_of
from sglang_uvm_offload.residency.history import Curve, combined
from sglang_uvm_offload.residency.status import MAX_EXPERTS, Experts, OffloadStatus, RankStatus

MAX_RANKS = 1 << 10


class State(Struct, frozen=True):
    """One of ``internal_states``. SGLang shows the first rank of each data-parallel replica."""

    expert_offload: RankStatus | None = None
    tp_size: Experts = 1
    pp_size: Experts = 1
    ep_size: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    dp_size: Experts = 1
    enable_dp_attention: bool = False
    expert_offload_num_resident: str | int | None = None
    expert_offload_resident_selection: str = ""

    def __post_init__(self) -> None:
        if self.expert_offload is not None:
            self.expert_offload.check()


class ServerInfo(Struct, frozen=True):
    """The ``/server_info`` of a server that offloads experts, which has the first rank of each data-parallel replica."""

    internal_states: Annotated[list[State], Meta(max_length=MAX_RANKS)]
    model_path: str = ""
    version: str = ""
    all_ranks: OffloadStatus | None = None
    """The server's answer to ``GET /expert_offload``, which has more ranks; None in a saved ``/server_info``."""

    def __post_init__(self) -> None:
        for rank in self.all_ranks.ranks if self.all_ranks is not None else ():
            rank.check()

    @property
    def ranks(self) -> list[RankStatus]:
        if self.all_ranks is not None and self.all_ranks.ranks:
            return list(self.all_ranks.ranks)
        return [state.expert_offload for state in self.internal_states if state.expert_offload is not None]

    @property
    def rank_names(self) -> list[str]:
        """The name of each of ``ranks``."""
        names = names_of(self.ranks)
        if len(set(names)) < len(names):  # statistics that earlier versions saved
            return [f"rank {index}" for index in range(len(names))]
        return names

    @property
    def curve(self) -> Curve | None:
        """The curve over all ranks; None if no decode step was counted."""
        return combined([rank.curve for rank in self.ranks if rank.curve is not None])


class ReplayResults(Struct, frozen=True):
    """The output of ``replay --json``."""

    trace: str
    results: Annotated[list[Replay], Meta(min_length=1, max_length=100)]
    scored: Scope | None = None
    """None in the output of earlier versions."""

    def __post_init__(self) -> None:
        if len({(result.residency, result.batch) for result in self.results}) > 1:
            raise ValueError("the results must be of one residency and one batch")


def budget(ranks: Sequence[RankStatus]) -> float:
    """The residents per layer on each rank: the number of routed experts that fill their VRAM, on average over the layers that
    can be offloaded."""
    placed = [layer for rank in ranks for layer in rank.layers if layer.expert_bytes]
    counts = [min(layer.resident_bytes / layer.expert_bytes, layer.experts) for layer in placed]
    return sum(counts) / len(counts) if counts else 0.0


def slots_a_layer(ranks: Sequence[RankStatus]) -> float:
    """The slots per layer on each rank: the number of experts that fill their VRAM, on average."""
    nbytes = sum(rank.slots.nbytes for rank in ranks if rank.slots is not None)
    return nbytes / max(1, sum(layer.expert_bytes for rank in ranks for layer in rank.layers))


def follows(ranks: Sequence[RankStatus]) -> bool:
    """Whether the experts in VRAM change with the traffic. If so, all layers share one budget."""
    return any(rank.adapt == "continuous" for rank in ranks) or slots_serve(ranks)


def slots_serve(ranks: Sequence[RankStatus]) -> bool:
    """Whether slots have served any activation. Some MoE runners cannot use them."""
    return any(rank.slots is not None and rank.slots.hits + rank.slots.fills > 0 for rank in ranks)


def hit_rate(served: float, counted: float) -> float | None:
    """The share of ``counted`` uses of experts that VRAM ``served``, at most 1; None without uses."""
    return min(1.0, served / counted) if counted else None


def decode_hit_rate(ranks: Sequence[RankStatus]) -> float | None:
    """The share of decode activations that were served from VRAM, residents or slots; None without activations."""
    counted = sum(rank.history.activations[-1] for rank in ranks)
    return hit_rate(sum(rank.history.activations_resident[-1] for rank in ranks), counted)


def recent_hit_rate(ranks: Sequence[RankStatus]) -> float | None:
    """``decode_hit_rate`` in the latest half of the time."""
    counted = sum(rank.history.recent_growth("activations") for rank in ranks)
    return hit_rate(sum(rank.history.recent_growth("activations_resident") for rank in ranks), counted)

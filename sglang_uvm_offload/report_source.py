"""What a report is made from: a server's statistics or a replay's results, as records that check what they are decoded from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from sglang_uvm_offload.history import Count, Curve, Past, Share, combined

MAX_LAYERS, MAX_EXPERTS, MAX_RANKS = 1 << 10, 1 << 13, 1 << 10
Experts = Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]


class Layer(Struct, frozen=True):
    """One MoE layer on one rank, with what it served since the start."""

    layer: Count
    first_expert: Experts
    experts: Experts
    shared_experts: Experts
    expert_bytes: Count
    routed: Count
    routed_resident: Count


class ProfileVerdict(Struct, frozen=True):
    """What the first ``tokens`` live tokens showed of a profile: the share of their routing that its residents covered, that
    which the best residents for these tokens would have, and whether its residents were kept."""

    coverage: Share
    best: Share
    tokens: Count
    kept: bool


class Recorded(Struct, frozen=True):
    """What ``--expert-offload-trace`` recorded so far, to be saved at ``path``."""

    path: str
    tokens: Count
    requests: Count
    dropped_steps: Count
    stopped: bool

    def __post_init__(self) -> None:
        if self.requests > self.tokens:
            raise ValueError(f"{self.requests} requests cannot have {self.tokens} tokens in a trace")


class Rank(Struct, frozen=True):
    """``OffloadManager.status`` of one rank, with its trace where it records one."""

    backend: str
    layers: Annotated[list[Layer], Meta(max_length=MAX_LAYERS)]
    resident_ids: list[list[Count]]
    resident_experts: Count
    offloaded_experts: Count
    resident_bytes: Count
    offloaded_bytes: Count
    tokens: Count
    warmup_done: bool
    adapt: str
    per_layer: str
    fault: str | None
    history: Past
    curve: Curve | None
    profile: ProfileVerdict | None = None
    trace: Recorded | None = None

    def __post_init__(self) -> None:
        if len(self.resident_ids) != len(self.layers):
            raise ValueError("resident_ids must have one list for each of layers")
        for layer, ids in zip(self.layers, self.resident_ids, strict=True):
            first, end = layer.first_expert, layer.first_expert + layer.experts + layer.shared_experts
            if end > MAX_EXPERTS:
                raise ValueError(f"layer {layer.layer} has expert {end - 1}, and more than {MAX_EXPERTS} are not shown")
            if any(not first <= expert < end for expert in ids):
                raise ValueError(f"the resident ids of layer {layer.layer} must be {first}..{end - 1}")

    @property
    def routed_residents(self) -> list[tuple[Layer, list[int]]]:
        """Each layer with the ids of its residents that are no shared experts."""
        pairs = zip(self.layers, self.resident_ids, strict=True)
        return [(layer, [i for i in ids if i < layer.first_expert + layer.experts]) for layer, ids in pairs]


class State(Struct, frozen=True):
    """One of ``internal_states``: SGLang shows the first rank of each data-parallel rank."""

    expert_offload: Rank | None = None
    tp_size: Experts = 1
    pp_size: Experts = 1
    ep_size: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)] = 1
    dp_size: Experts = 1
    enable_dp_attention: bool = False
    expert_offload_num_resident: str | int | None = None
    expert_offload_resident_selection: str = ""


class ServerInfo(Struct, frozen=True):
    """``/server_info`` of a server that offloads experts."""

    internal_states: Annotated[list[State], Meta(max_length=MAX_RANKS)]
    model_path: str = ""
    version: str = ""

    @property
    def ranks(self) -> list[Rank]:
        return [state.expert_offload for state in self.internal_states if state.expert_offload is not None]

    @property
    def rank_names(self) -> list[str]:
        """One for each of ``ranks``."""
        return [f"DP rank {index}" for index in range(len(self.ranks))] if len(self.ranks) > 1 else ["rank 0"]

    @property
    def curve(self) -> Curve | None:
        """That of all ranks; None where no decode step was counted."""
        return combined([rank.curve for rank in self.ranks if rank.curve is not None])


class Result(Struct, frozen=True):
    """``simulator.Replay``."""

    policy: str
    residency: Share
    batch: Count
    coverage: Share
    moves_per_step: Amount
    read_bytes_per_step: Amount
    moved_bytes_per_step: Amount
    step_seconds: Amount
    per_layer_coverage: Annotated[list[Share], Meta(max_length=MAX_LAYERS)]
    coverage_over_time: Annotated[list[Share], Meta(max_length=1000)]


class ReplayResults(Struct, frozen=True):
    """What ``replay --json`` prints."""

    trace: str
    results: Annotated[list[Result], Meta(min_length=1, max_length=100)]

    def __post_init__(self) -> None:
        if len({(result.residency, result.batch) for result in self.results}) > 1:
            raise ValueError("the results must be of one residency and one batch")


def budget(ranks: Sequence[Rank]) -> float:
    """Routed residents a layer on each rank, in the mean over the layers that can be offloaded."""
    counts = [len(routed) for rank in ranks for layer, routed in rank.routed_residents if layer.expert_bytes]
    return sum(counts) / len(counts) if counts else 0.0


def served_of_late(ranks: Sequence[Rank]) -> float | None:
    """The share of uses in decode steps that residents served in the latest half of the time; None where there were none."""
    counted = sum(rank.history.of_late("touches") for rank in ranks)
    return sum(rank.history.of_late("touches_resident") for rank in ranks) / counted if counted else None

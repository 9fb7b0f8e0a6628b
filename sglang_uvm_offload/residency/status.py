"""What one rank reports of itself: one typed record, written by ``reporting.rank_status`` and read by ``/server_info``, the
report, and the benchmarks.

The fields carry the bounds that hold for data from outside; ``check`` holds what lies between fields. Bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

MAX_LAYERS, MAX_EXPERTS = 1 << 10, 1 << 13

Count = Annotated[int, Meta(ge=0, le=1 << 60)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Share = Annotated[float, Meta(ge=0, le=1)]
Residents = Annotated[int, Meta(ge=0, le=1 << 15)]
Experts = Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]


class Past(Struct, frozen=True):
    """Totals since the model was loaded, from the first sample to the last: ``tokens`` of all ranks together, the others as in
    the ledger, over all layers."""

    seconds: Annotated[list[Seconds], Meta(min_length=1)]
    steps: list[Count]
    tokens: list[Count]
    routed: list[Count]
    routed_resident: list[Count]
    activations: list[Count]
    activations_resident: list[Count]
    zero_copy_bytes: list[Count]
    moves: list[Count]
    moved_bytes: list[Count]

    def check(self) -> None:
        """Raise ``ValueError`` for columns that no server has."""
        columns = [getattr(self, name) for name in self.__struct_fields__]
        if {len(column) for column in columns} != {len(self.seconds)}:
            raise ValueError("the columns must be equally long")
        if any(later < earlier for column in columns for earlier, later in pairwise(column)):
            raise ValueError("totals must not fall")

    def of_late(self, column: str) -> int:
        """What the latest half of the time added to a total, or more where it was not sampled at its beginning."""
        values = getattr(self, column)
        begin = int(np.searchsorted(self.seconds, self.seconds[-1] / 2, side="right")) - 1
        return values[-1] - values[begin]

    def rates(self, part: str, whole: str) -> list[tuple[float, float | None]]:
        """``(seconds, what part gained for each of whole)``, flat from sample to sample; None where whole gained nothing."""
        points: list[tuple[float, float | None]] = []
        samples = zip(self.seconds, getattr(self, part), getattr(self, whole), strict=True)
        for (begin, part_before, before), (end, part_after, after) in pairwise(samples):
            rate = (part_after - part_before) / (after - before) if after > before else None
            points += [(begin, rate), (end, rate)]
        return points


class Curve(Struct, frozen=True):
    """What share of ``activations`` (uses by decode steps of the experts that can be offloaded) the best fixed residents would
    have served: n of each layer (``uniform``), or as many bytes of all layers together (``pooled``), for n in ``residents``;
    and what share the ``present`` ones would have. The best are chosen from the activations that they are measured on: upper
    bounds.
    """

    decode_steps: Count
    activations: Annotated[int, Meta(ge=1, le=1 << 60)]
    present: Share
    residents: Annotated[list[Residents], Meta(min_length=2)]
    uniform: list[Share]
    pooled: list[Share] = msgspec.field(name="global")

    def check(self) -> None:
        """Raise ``ValueError`` for points that are no curve."""
        if not len(self.residents) == len(self.uniform) == len(self.pooled):
            raise ValueError("residents, uniform and global must be equally long")
        if any(later <= earlier for earlier, later in pairwise(self.residents)):
            raise ValueError("residents must rise")

    def at(self, residents: float, pooled: bool) -> float:
        """The best share at so many residents a layer, between points by a straight line."""
        return float(np.interp(residents, self.residents, self.pooled if pooled else self.uniform))


def combined(curves: Sequence[Curve]) -> Curve | None:
    """The curves of several ranks as one, each weighing as much as it was activated; n counts on each rank. None for no
    curve."""
    if not curves:
        return None
    total = sum(curve.activations for curve in curves)
    grid = sorted({n for curve in curves for n in curve.residents})

    def mean(pooled: bool) -> list[float]:
        return [min(1.0, sum(curve.activations / total * curve.at(n, pooled) for curve in curves)) for n in grid]

    return Curve(
        decode_steps=max(curve.decode_steps for curve in curves),
        activations=total,
        present=min(1.0, sum(curve.activations / total * curve.present for curve in curves)),
        residents=grid,
        uniform=mean(False),
        pooled=mean(True),
    )


class LayerStatus(Struct, frozen=True):
    """One MoE layer on one rank, with what it served since the start."""

    layer: Count
    first_expert: Experts
    experts: Experts
    shared_experts: Experts
    expert_bytes: Count
    routed: Count
    routed_resident: Count
    activations: Count
    activations_resident: Count
    zero_copy_bytes: Count


class ProfileVerdict(Struct, frozen=True):
    """What the first ``tokens`` live tokens showed of a profile: the share of their routing that its residents covered, that
    which the best residents for these tokens would have, and whether its residents were kept."""

    hit_rate: Share
    best: Share
    tokens: Count
    kept: bool


class TraceStatus(Struct, frozen=True):
    """What ``--expert-offload-trace`` recorded so far, to be saved at ``path``."""

    path: str
    tokens: Count
    requests: Count
    dropped_steps: Count
    stopped: bool

    def check(self) -> None:
        """Raise ``ValueError`` for totals that no trace has."""
        if self.requests > self.tokens:
            raise ValueError(f"{self.requests} requests cannot have {self.tokens} tokens in a trace")


class RankStatus(Struct, frozen=True):
    """The experts of one rank, and what its steps were served from since the model was loaded."""

    backend: str
    num_layers: Count
    num_experts: Count
    """Routed and fused shared experts of all layers."""
    resident_experts: Count
    offloaded_experts: Count
    resident_bytes: Count
    offloaded_bytes: Count
    plain_bytes: Count
    """Expert tensors in ordinary VRAM."""
    stranded_bytes: Count
    """VRAM that offloaded experts are expected to keep after moves; 0 where residents never change."""
    draft_layers: Count
    draft_bytes: Count
    layers: Annotated[list[LayerStatus], Meta(max_length=MAX_LAYERS)]
    resident_ids: list[list[Count]]
    """The model's ids of the residents of each of ``layers``."""
    tokens: Count
    warmup_done: bool
    adapt: str
    routed: Count
    hit_rate: Share | None
    """The share of ``routed`` tokens that residents served, None before the first."""
    zero_copy_bytes: Count
    moves: Count
    moved_bytes: Count
    moving_seconds: Seconds
    fault: str | None
    """Why moving experts stopped, None where it did not."""
    history: Past
    curve: Curve | None
    profile: ProfileVerdict | None = None
    trace: TraceStatus | None = None

    def check(self) -> None:
        """Raise ``ValueError`` for what no rank reports. For readers: a rank that reports never ends over its own figures."""
        self.history.check()
        for part in (self.curve, self.trace):
            if part is not None:
                part.check()
        if len(self.resident_ids) != len(self.layers):
            raise ValueError("resident_ids must have one list for each of layers")
        for layer, ids in zip(self.layers, self.resident_ids, strict=True):
            first, end = layer.first_expert, layer.first_expert + layer.experts + layer.shared_experts
            if end > MAX_EXPERTS:
                raise ValueError(f"layer {layer.layer} has expert {end - 1}, and more than {MAX_EXPERTS} are not shown")
            if any(not first <= expert < end for expert in ids):
                raise ValueError(f"the resident ids of layer {layer.layer} must be {first}..{end - 1}")

    @property
    def routed_residents(self) -> list[tuple[LayerStatus, list[int]]]:
        """Each layer with the ids of its residents that are no shared experts."""
        pairs = zip(self.layers, self.resident_ids, strict=True)
        return [(layer, [i for i in ids if i < layer.first_expert + layer.experts]) for layer, ids in pairs]

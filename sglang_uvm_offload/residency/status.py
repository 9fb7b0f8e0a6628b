"""The status of one rank: one typed record, written by ``reporting.rank_status`` and read by ``/server_info``, the report, and
the benchmarks.

Fields carry the bounds for data from outside; ``check`` validates across fields. Units are bytes and seconds.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from sglang_uvm_offload.memory.link import LinkStatus
from sglang_uvm_offload.residency.bounds import Count, Listed, Seconds, Share
from sglang_uvm_offload.residency.curve import Curve
from sglang_uvm_offload.residency.start import StartPhase

MAX_LAYERS, MAX_EXPERTS = 1 << 10, 1 << 13

Experts = Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
Ids = Annotated[list[Count], Meta(max_length=MAX_EXPERTS)]
Totals = Annotated[list[Count], Listed]


class Past(Struct, frozen=True):
    """Samples of totals since the model was loaded: ``tokens`` of all ranks together, the others as in the ledger, over all
    layers."""

    seconds: Annotated[list[Seconds], Meta(min_length=1), Listed]
    steps: Totals
    tokens: Totals
    routed: Totals
    routed_resident: Totals
    activations: Totals
    activations_resident: Totals
    zero_copy_bytes: Totals
    streamed_bytes: Totals
    filled_bytes: Totals
    moves: Totals
    moved_bytes: Totals

    def check(self) -> None:
        """Raise ``ValueError`` for columns that no server reports."""
        columns = [getattr(self, name) for name in self.__struct_fields__]
        if {len(column) for column in columns} != {len(self.seconds)}:
            raise ValueError("the columns must be equally long")
        if any(later < earlier for column in columns for earlier, later in pairwise(column)):
            raise ValueError("totals must not fall")

    def recent_growth(self, column: str) -> int:
        """The growth of a total over the latest half of the time; more where no sample falls on its beginning."""
        values = getattr(self, column)
        begin = int(np.searchsorted(self.seconds, self.seconds[-1] / 2, side="right")) - 1
        return values[-1] - values[begin]

    def rates(self, part: str, whole: str) -> list[tuple[float, float | None]]:
        """``(seconds, growth of part per growth of whole)``, constant between samples; None where whole did not grow."""
        points: list[tuple[float, float | None]] = []
        samples = zip(self.seconds, getattr(self, part), getattr(self, whole), strict=True)
        for (begin, part_before, before), (end, part_after, after) in pairwise(samples):
            rate = (part_after - part_before) / (after - before) if after > before else None
            points += [(begin, rate), (end, rate)]
        return points


class LayerStatus(Struct, frozen=True):
    """One MoE layer on one rank, with its totals since the start."""

    layer: Count
    first_expert: Experts
    experts: Experts
    shared_experts: Experts
    expert_bytes: Count
    resident_bytes: Count
    """VRAM of what can be offloaded, in whole blocks."""
    routed: Count
    routed_resident: Count
    """Routed tokens, and those on residents or slots, whether steps read in place or stream. An expert that is in VRAM in part
    serves that part of each token."""
    activations: Count
    activations_resident: Count
    zero_copy_bytes: Count
    streamed_bytes: Count
    expert_ids: Annotated[list[Experts], Meta(max_length=MAX_EXPERTS)] = []
    """The checkpoint's ids of the routed experts, in the order of their places, with one entry for each replica; empty where
    they are ``first_expert`` and those after it."""

    @property
    def ids(self) -> list[int]:
        """The checkpoint's ids of the routed experts."""
        return self.expert_ids or list(range(self.first_expert, self.first_expert + self.experts))


class ProfileVerdict(Struct, frozen=True):
    """How a profile did over the first ``tokens`` live tokens: the hit rate of its residents, that of the best residents for
    these tokens, and whether its residents were kept."""

    hit_rate: Share
    best: Share
    tokens: Count
    kept: bool


class TraceStatus(Struct, frozen=True):
    """What ``--expert-offload-trace`` has recorded so far; it is saved at ``path``."""

    path: str
    tokens: Count
    requests: Count
    dropped_steps: Count
    stopped: bool

    def check(self) -> None:
        """Raise ``ValueError`` for totals that no trace has."""
        if self.requests > self.tokens:
            raise ValueError(f"{self.requests} requests cannot have {self.tokens} tokens in a trace")


class SaveStatus(Struct, frozen=True):
    """What a rank saves to a file while it serves."""

    what: str
    """``profile`` or ``trace``."""
    under_way: bool
    saved_at: Seconds | None
    """When it was last saved, in seconds since 1970; None before the first time."""
    failures: Count
    error: str | None
    """Why the last save failed, None if it did not."""


class StreamStatus(Struct, frozen=True):
    """The stream buffers of a rank."""

    buffers: Count
    nbytes: Count
    """VRAM of all together."""
    min_tokens: Count
    """Steps of this many tokens or more stream."""
    fault: str | None
    """Why they no longer do, None while they do."""


class SlotStatus(Struct, frozen=True):
    """A rank's slots. Activations count experts that are offloaded, in whole or in part."""

    a_layer: Count
    nbytes: Count
    """VRAM of all."""
    missing: str | None
    """A tensor that has no rows for slots, and its layer, which can use none; None where all have them."""
    hits: Count
    """Activations that a slot served."""
    fills: Count
    """Activations that were copied into a slot, and served from it."""
    bypasses: Count
    """Activations that were read in place."""
    filled_bytes: Count
    """Bytes of offloaded experts that fills brought over the link."""
    kept: Count
    """Experts that steps that streamed have left in slots, copied from VRAM."""


class RankStatus(Struct, frozen=True):
    """The experts of one rank, and where its steps were served from since the model was loaded."""

    backend: str
    num_layers: Count
    num_experts: Count
    """Routed and fused shared experts of all layers."""
    resident_experts: Count
    """Those wholly in VRAM."""
    partly_resident_experts: Count
    offloaded_experts: Count
    """Those without a byte in VRAM."""
    resident_bytes: Count
    """VRAM, in whole blocks."""
    offloaded_bytes: Count
    plain_bytes: Count
    """Expert tensors in ordinary VRAM."""
    draft_layers: Count
    draft_bytes: Count
    """VRAM of the experts of draft models."""
    layers: Annotated[list[LayerStatus], Meta(max_length=MAX_LAYERS)]
    resident_ids: Annotated[list[Ids], Meta(max_length=MAX_LAYERS)]
    """The checkpoint's ids of the experts of each of ``layers`` that are wholly in VRAM; an expert with replicas may be there
    more than once."""
    partly_resident_ids: Annotated[list[Ids], Meta(max_length=MAX_LAYERS)]
    """Those that are in VRAM in part: a block holds several experts."""
    tokens: Count
    warmup_done: bool
    adapt: str
    routed: Count
    hit_rate: Share | None
    """The share of ``routed`` tokens on residents or slots, None before the first."""
    byte_hit_rate: Share | None
    """The share of the bytes of the experts that steps read in place, each once a step, that were in VRAM."""
    zero_copy_bytes: Count
    """Bytes of offloaded experts that steps read in place, each expert once a step."""
    streamed_bytes: Count
    """Bytes of offloaded experts that were copied over the link for steps that stream, each byte once a step."""
    moves: Count
    """Promotions, each of neighbouring blocks that hold the same experts."""
    moved_bytes: Count
    moving_seconds: Seconds
    moving: bool
    """Whether a move is under way."""
    fault: str | None
    """Why moving experts stopped, None while it works."""
    history: Past
    curve: Curve | None
    slots: SlotStatus | None = None
    """None without slots."""
    profile: ProfileVerdict | None = None
    trace: TraceStatus | None = None
    streaming: StreamStatus | None = None
    """None where no step streams."""
    paused: bool = False
    """Whether an operator has residents stay where they are."""
    saves: Annotated[list[SaveStatus], Listed] = []
    replica: Count = 0
    """The data-parallel rank."""
    evicted_bytes: Count | None = None
    """Bytes of residents that the driver had evicted when the rank last looked (every ten seconds while it serves), estimated
    from a sample of blocks; None before the first look, and where it cannot tell."""
    draft_offloaded_bytes: Count = 0
    draft_hit_rate: Share | None = None
    """As ``hit_rate``, for draft models with offloaded experts; None without any."""
    draft_zero_copy_bytes: Count = 0
    """As ``zero_copy_bytes``."""
    link: LinkStatus | None = None
    """None where nothing was measured."""
    hit_rate_before: Share | None = None
    hit_rate_since: Share | None = None
    """``hit_rate`` until residents were last chosen all at once, by a warm-up or an operator, and since then; None where there
    were no tokens, and both before the first choice."""
    start: Annotated[list[StartPhase], Listed] = []
    """What the start of this rank took; empty until it serves."""
    lookup_table_bytes: Count = 0
    """Host RAM of lookup tables that kernels read in place."""
    plugin_version: str = ""
    """Empty in statistics that earlier versions saved."""

    def check(self) -> None:
        """Raise ``ValueError`` for values that no rank reports. Only readers call it: a server never fails over its own
        status."""
        self.history.check()
        for part in (self.curve, self.trace):
            if part is not None:
                part.check()
        for name in ("resident_ids", "partly_resident_ids"):
            if len(getattr(self, name)) != len(self.layers):
                raise ValueError(f"{name} must have one list for each of layers")
        for layer, whole, partly in zip(self.layers, self.resident_ids, self.partly_resident_ids, strict=True):
            ids = whole + partly
            first, end = layer.first_expert, layer.first_expert + layer.experts + layer.shared_experts
            if end > MAX_EXPERTS:
                raise ValueError(f"layer {layer.layer} has expert {end - 1}, and more than {MAX_EXPERTS} are not shown")
            if layer.expert_ids:
                first, end = 0, MAX_EXPERTS
                if len(layer.expert_ids) != layer.experts:
                    raise ValueError(f"layer {layer.layer} has {layer.experts} experts and {len(layer.expert_ids)} ids")
            if any(not first <= expert < end for expert in ids + layer.expert_ids):
                raise ValueError(f"the resident ids of layer {layer.layer} must be {first}..{end - 1}")

    @property
    def routed_residents(self) -> list[tuple[LayerStatus, list[int], list[int]]]:
        """Each layer with the ids of its routed experts that are wholly in VRAM, and of those that are there in part."""
        triples = zip(self.layers, self.resident_ids, self.partly_resident_ids, strict=True)
        return [(layer, _routed(layer, whole), _routed(layer, partly)) for layer, whole, partly in triples]


def _routed(layer: LayerStatus, ids: list[int]) -> list[int]:
    routed = set(layer.ids)
    return [i for i in ids if i in routed]

"""The status of one rank: one typed record, which the rank fills, and which HTTP clients, the report and the benchmarks read.

Fields carry the bounds for data from outside; ``check`` validates across fields. Units are bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import astuple

from sglang_uvm_offload import __version__
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.memory.link import LinkStatus
from sglang_uvm_offload.residency.history import Curve, Past, ProfileVerdict, hit_rate_curve
from sglang_uvm_offload.residency.ledger import Ledger, hit_rate_of
from sglang_uvm_offload.units import Count, Listed, Seconds, Share, size

if TYPE_CHECKING:
    from sglang_uvm_offload.experts.layer import ExpertLayer
    from sglang_uvm_offload.memory.protocol import MemoryInfo
    from sglang_uvm_offload.residency.manager import OffloadManager

MAX_LAYERS, MAX_EXPERTS = 1 << 10, 1 << 13

Experts = Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
Ids = Annotated[list[Count], Meta(max_length=MAX_EXPERTS)]


class LayerStatus(Struct, frozen=True):
    """One MoE layer on one rank, with its totals since the start."""

    layer: Count
    first_expert: Experts
    experts: Experts
    shared_experts: Experts
    expert_bytes: Count
    resident_bytes: Count
    """VRAM of the experts that can be offloaded, in whole blocks."""
    routed: Count
    routed_resident: Count
    """Routed tokens, and those on residents or slots, in steps that read in place and in steps that stream. An expert that is
    partly in VRAM serves that part of each token."""
    activations: Count
    activations_resident: Count
    zero_copy_bytes: Count
    streamed_bytes: Count
    expert_ids: Annotated[list[Experts], Meta(max_length=MAX_EXPERTS)] = []
    """The checkpoint's ids of the routed experts, in the order of their places, replicas included; empty if they are
    consecutive from ``first_expert`` on."""

    @property
    def ids(self) -> list[int]:
        """The checkpoint's ids of the routed experts."""
        return self.expert_ids or list(range(self.first_expert, self.first_expert + self.experts))


class TraceStatus(Struct, frozen=True):
    """What the trace, which is saved at ``path``, has recorded so far."""

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
    """A file that a rank saves while it serves."""

    what: str
    """``profile``, ``trace`` or ``statistics``."""
    under_way: bool
    saved_at: Seconds | None
    """The time of the last save, in seconds since 1970; None before the first."""
    failures: Count
    error: str | None
    """Why the last save failed; None if it succeeded."""


class StreamStatus(Struct, frozen=True):
    """The stream buffers of a rank."""

    buffers: Count
    nbytes: Count
    """VRAM of all buffers."""
    min_tokens: Count
    """Steps of this many tokens or more stream."""
    fault: str | None
    """Why streaming stopped; None while it works."""


class SlotStatus(Struct, frozen=True):
    """A rank's slots. The counts are activations of experts that are offloaded, fully or partly."""

    a_layer: Count
    """Slots of the layer that has the most."""
    nbytes: Count
    """VRAM of all slots."""
    missing: str | None
    """A layer that cannot use slots, and why; None if every layer can."""
    hits: Count
    """Activations served by a slot that held the expert already."""
    fills: Count
    """Activations whose expert was copied into a slot and served from it."""
    bypasses: Count
    """Activations whose expert was read in place."""
    filled_bytes: Count
    """Bytes of offloaded experts that fills copied over the link."""
    brought: Count
    """Experts that were copied into slots before a step that streams computed them."""


class LookaheadStatus(Struct, frozen=True):
    """What slots gained by looking ahead in decode steps so far, in experts of the layers that they look ahead for."""

    misses: Count
    """Activated experts that no slot held."""
    brought: Count
    """Experts that were copied before their layer, at least in part."""
    right: Count
    """Those of ``misses`` that were copied before their layer, so that the layer did not wait for their bytes."""

    @property
    def recall(self) -> float:
        """The share of misses that were copied ahead."""
        return self.right / self.misses if self.misses else 0.0

    @property
    def precision(self) -> float:
        """The share of the experts copied ahead that their layer used."""
        return self.right / self.brought if self.brought else 0.0

    def __str__(self) -> str:
        if not self.brought:
            return f"nothing came ahead of {self.misses} misses"
        right = f"{100 * self.precision:.0f} % of what came ahead was used"
        return f"{100 * self.recall:.0f} % of {self.misses} misses came ahead; {right}"


class RankId(Struct, frozen=True):
    """A rank's place in each kind of parallelism."""

    dp: Count = 0
    pp: Count = 0
    tp: Count = 0
    ep: Count = 0

    def __str__(self) -> str:
        return " ".join(f"{kind}{number}" for kind, number in zip(self.__struct_fields__, astuple(self), strict=True))


class PhaseTime(Struct, frozen=True):
    """One phase of a rank's start, without the time of the phases within it."""

    name: str
    seconds: Seconds
    nbytes: Count = 0
    """Bytes that the phase read, placed or converted; 0 for other phases."""

    def __str__(self) -> str:
        took = f"{self.name} {self.seconds:.1f} s"
        if not self.nbytes:
            return took
        alone = self.seconds and self.name == "read"  # experts get most of their pages beside other phases
        rate = f" at {size(self.nbytes / self.seconds)}/s" if alone else ""
        return f"{took} ({size(self.nbytes)}{rate})"


def described(phases: Sequence[PhaseTime]) -> str:
    """The time of a start and of each of its phases, in one line."""
    return f"{sum(phase.seconds for phase in phases):.1f} s: {', '.join(map(str, phases))}"


class RankStatus(Struct, frozen=True):
    """Where the experts of one rank are, and where its steps have read them since the model was loaded."""

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
    """VRAM of residents, in whole blocks."""
    offloaded_bytes: Count
    plain_bytes: Count
    """Expert tensors in ordinary VRAM."""
    draft_layers: Count
    draft_bytes: Count
    """VRAM of the experts of draft models."""
    layers: Annotated[list[LayerStatus], Meta(max_length=MAX_LAYERS)]
    resident_ids: Annotated[list[Ids], Meta(max_length=MAX_LAYERS)]
    """For each of ``layers``, the checkpoint's ids of the experts that are wholly in VRAM; an expert with replicas may occur
    more than once."""
    partly_resident_ids: Annotated[list[Ids], Meta(max_length=MAX_LAYERS)]
    """The same for experts that are partly in VRAM: a block holds parts of several experts."""
    tokens: Count
    warmup_done: bool
    adapt: str
    routed: Count
    hit_rate: Share | None
    """The share of ``routed`` tokens on residents or slots; None before the first token."""
    byte_hit_rate: Share | None
    """The share of expert bytes read in place, each counted once a step, that were in VRAM; None before the first step."""
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
    """Why experts no longer move; None while they do."""
    history: Past
    curve: Curve | None
    slots: SlotStatus | None = None
    """None without slots."""
    lookahead: LookaheadStatus | None = None
    """None if slots do not look ahead."""
    profile: ProfileVerdict | None = None
    trace: TraceStatus | None = None
    streaming: StreamStatus | None = None
    """None if no step streams."""
    paused: bool = False
    """Whether an operator has paused changes of residents."""
    saves: Annotated[list[SaveStatus], Listed] = []
    rank: RankId = RankId()
    chosen_from_tokens: Count | None = None
    """The tokens whose routing residents were last chosen from all at once; None before the first such choice."""
    tokens_since_choice: Count = 0
    """What the next such choice would use."""
    fewest_tokens: Count = 1
    """With fewer, ``readvise`` changes nothing."""
    host_free_bytes: Count | None = None
    """Host RAM that the rank may still take: what its node has free, or what the limit of its cgroup leaves if that is less.
    None in statistics that earlier versions saved."""
    evicted_bytes: Count | None = None
    """Bytes of residents that the driver had evicted when the rank last looked (every ten seconds while it serves), estimated
    from a sample of blocks; None before the first look, and where it cannot tell."""
    reclaimable_bytes: Count | None = None
    """VRAM, at most, that the driver keeps for blocks of experts, draft models' too, that were in VRAM since they were placed
    and are not now (a demoted page keeps its VRAM until something needs it: GPU_STATUS.md). An upper bound, because a plain
    allocation takes it without notice. None in statistics that earlier versions saved."""
    draft_offloaded_bytes: Count = 0
    draft_hit_rate: Share | None = None
    """As ``hit_rate``, for draft models with offloaded experts; None without any."""
    draft_zero_copy_bytes: Count = 0
    """As ``zero_copy_bytes``."""
    link: LinkStatus | None = None
    """None if the link was not measured."""
    hit_rate_before: Share | None = None
    hit_rate_since: Share | None = None
    """``hit_rate`` before residents were last chosen all at once (by a warm-up or an operator), and since then. Both are None
    before the first choice, and either is where it has no tokens."""
    start: Annotated[list[PhaseTime], Listed] = []
    """The phases of this rank's start; empty until it serves."""
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


class OffloadStatus(Struct, frozen=True):
    """The response of ``GET`` and ``POST /expert_offload``."""

    version: str
    """The plugin's version."""
    ranks: Annotated[list[RankStatus], Listed]
    """In the order of their ``rank``."""
    left_out: Count = 0
    """Ranks without a status here: those of other nodes, and those that did not answer in time."""
    note: str | None = None
    """What an action did; None where the statuses say it."""


def _routed(layer: LayerStatus, ids: list[int]) -> list[int]:
    routed = set(layer.ids)
    return [i for i in ids if i in routed]


def rank_status(manager: OffloadManager, wait: bool = True) -> RankStatus:
    """The status of a rank, up to the last step launched; without ``wait``, up to the last counts that have arrived. Only
    ``wait`` waits for the device."""
    if wait:
        manager.ledger.catch_up()
        for residents in manager.drafts:
            residents.ledger.catch_up()
    else:
        manager.poll()
    target, ledger, drafts = manager.target, manager.ledger, [residents.ledger for residents in manager.drafts]
    layers = target.layers
    taken = target.extents.bytes_by_layer(target.resident_extents() & target.movable())
    shares = [1.0 - layer.offloaded_bytes_by_expert / max(layer.expert_bytes, 1) for layer in layers]
    partly = [(share > 0) & (share < 1) for share in shares]
    before, since = _around_choice(ledger.totals_routed, manager.residents.routed_before)
    draft = [layer for model in manager.models if model.draft for layer in model.layers]
    return RankStatus(
        backend=manager.memory.name,
        num_layers=len(layers),
        num_experts=sum(layer.num_experts for layer in layers),
        resident_experts=sum(int((share == 1).sum()) for share in shares),
        partly_resident_experts=sum(int(some.sum()) for some in partly),
        offloaded_experts=sum(int((share == 0).sum()) for share in shares),
        resident_bytes=sum(layer.resident_bytes for layer in layers),
        offloaded_bytes=sum(layer.offloaded_bytes for layer in layers),
        plain_bytes=sum(layer.plain_bytes for layer in layers),
        slots=_slot_status(layers, ledger),
        draft_layers=len(draft),
        draft_bytes=sum(layer.resident_bytes for layer in draft),
        draft_offloaded_bytes=sum(layer.offloaded_bytes for layer in draft),
        draft_hit_rate=hit_rate_of(drafts),
        draft_zero_copy_bytes=sum(int(ledger.zero_copy_bytes.sum()) for ledger in drafts),
        layers=[_layer_status(layer, ledger, index, int(taken[index])) for index, layer in enumerate(layers)],
        resident_ids=[_ids(layer, share == 1) for layer, share in zip(layers, shares, strict=True)],
        partly_resident_ids=[_ids(layer, some) for layer, some in zip(layers, partly, strict=True)],
        tokens=manager.tokens,
        warmup_done=manager.residents.warm,
        adapt=manager.config.adapt,
        routed=int(ledger.routed.sum()),
        hit_rate=hit_rate_of([ledger]),
        byte_hit_rate=ledger.byte_hit_rate,
        hit_rate_before=before,
        hit_rate_since=since,
        zero_copy_bytes=int(ledger.zero_copy_bytes.sum()),
        streamed_bytes=int(ledger.streamed_bytes.sum()),
        moves=ledger.moves,
        moved_bytes=ledger.moved_bytes,
        moving_seconds=ledger.moving_seconds,
        moving=manager.mover.moving,
        fault=manager.fault,
        paused=manager.paused,
        history=manager.history.past(manager.tokens),
        curve=hit_rate_curve(ledger.counted, target),
        profile=manager.residents.profile_verdict,
        chosen_from_tokens=manager.residents.chosen_from_tokens,
        tokens_since_choice=manager.tokens_since_choice,
        fewest_tokens=manager.fewest_tokens,
        host_free_bytes=host_available(),
        evicted_bytes=manager.evictions.evicted_bytes,
        reclaimable_bytes=manager.reclaimable_bytes,
        link=manager.link,
        plugin_version=__version__,
    )


def _around_choice(now: tuple[int, float], at: tuple[int, float] | None) -> tuple[float | None, float | None]:
    """The hit rates before and since residents were chosen. Takes ``(routed tokens, those on residents or slots)`` now and at
    the choice."""
    if at is None:
        return None, None
    parts = (at, (now[0] - at[0], now[1] - at[1]))
    before, since = (min(1.0, max(0.0, hits / routed)) if routed else None for routed, hits in parts)
    return before, since


def _slot_status(layers: Sequence[ExpertLayer], ledger: Ledger) -> SlotStatus | None:
    a_layer = max((layer.num_slots for layer in layers), default=0)
    if not a_layer:
        return None
    pools = dict.fromkeys(layer.pool for layer in layers if layer.pool is not None)
    return SlotStatus(
        a_layer=a_layer,
        nbytes=sum(pool.slot_bytes for pool in pools),
        missing=next((f"MoE layer {la.layer_id}: {la.without_pool}" for la in layers if la.without_pool), None),
        hits=int(ledger.slot_hits.sum()),
        fills=int(ledger.slot_fills.sum()),
        bypasses=int(ledger.slot_bypasses.sum()),
        filled_bytes=int(ledger.filled_bytes.sum()),
        brought=int(ledger.slot_brought.sum()),
    )


def _ids(layer: ExpertLayer, experts: np.ndarray) -> list[int]:
    """The checkpoint's ids of ``experts`` (``bool[num_experts]``); those of fused shared experts follow."""
    where = layer.location
    end = where.places.stop if where.is_trivial else where.num_experts
    every = np.concatenate([where.ids, end + np.arange(layer.num_experts - len(where.places))])
    return every[experts].tolist()


_TOTALS = ("routed", "routed_resident", "activations", "activations_resident", "zero_copy_bytes", "streamed_bytes")


def _layer_status(layer: ExpertLayer, ledger: Ledger, index: int, taken: int) -> LayerStatus:
    """``taken``: VRAM of the layer's experts that can be offloaded, bytes."""
    shared = int(layer.always_resident.sum())
    return LayerStatus(
        layer=layer.layer_id,
        first_expert=layer.first_expert,
        experts=layer.num_experts - shared,
        shared_experts=shared,
        expert_ids=[] if layer.location.is_trivial else layer.location.ids.tolist(),
        expert_bytes=layer.expert_bytes,
        resident_bytes=taken,
        **{name: round(getattr(ledger, name)[index].item()) for name in _TOTALS},
    )


def residency_table(status: RankStatus, memory: MemoryInfo, kv_tokens: int) -> str:
    """The table that a rank logs when it starts. ``kv_tokens``: tokens that the KV cache holds."""
    layers, experts = status.num_layers, status.num_experts
    rows = [
        ("", "experts", "bytes"),
        ("MoE layers", str(layers), ""),
        ("routed and fused shared experts", str(experts), size(status.resident_bytes + status.offloaded_bytes)),
        ("  resident in VRAM", str(status.resident_experts), size(status.resident_bytes)),
        *([("  in both, by blocks", str(status.partly_resident_experts), "")] if status.partly_resident_experts else []),
        ("  offloaded to host RAM", str(status.offloaded_experts), size(status.offloaded_bytes)),
        ("expert tensors left in plain VRAM", "", size(status.plain_bytes)),
    ]
    if (slots := status.slots) is not None:
        rows.append((f"{slots.a_layer} slots a layer", "", size(slots.nbytes)))
    if status.draft_layers:
        offloaded = status.draft_offloaded_bytes
        part = "in VRAM" if offloaded else "all resident"
        rows.append((f"draft model, {status.draft_layers} MoE layers, {part}", "", size(status.draft_bytes)))
        rows += [("  offloaded to host RAM", "", size(offloaded))] if offloaded else []
    if status.lookup_table_bytes:
        rows.append(("lookup tables in host RAM", "", size(status.lookup_table_bytes)))
    if (streaming := status.streaming) is not None:
        what = f"{streaming.buffers} stream buffer{'s' if streaming.buffers > 1 else ''}, for steps of {streaming.min_tokens}"
        rows.append((f"{what} tokens or more", "", size(streaming.nbytes)))
    rows += [
        ("VRAM free now", "", f"{size(memory.device_free)} of {size(memory.device_total)}"),
        ("host RAM free now", "", size(memory.host_available)),
        ("KV cache room", "", f"{kv_tokens} tokens"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows)

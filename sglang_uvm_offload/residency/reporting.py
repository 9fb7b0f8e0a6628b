"""Filling the status record of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload import __version__
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.residency.history import hit_rate_curve
from sglang_uvm_offload.residency.ledger import Ledger, hit_rate_of
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.status import LayerStatus, RankStatus, SlotStatus


def rank_status(manager: OffloadManager) -> RankStatus:
    """The status of a rank, up to the last step launched. Waits for the device."""
    manager.observer.catch_up()
    layers, ledger = manager.target.layers, manager.ledger
    target = manager.target
    taken = target.extents.bytes_by_layer(target.resident_extents() & target.movable())
    shares = [_resident_share(layer) for layer in layers]
    drafting = manager.drafts.ledgers()
    before, since = _around_choice(ledger.totals_routed, manager.chooser.routed_before)
    draft = [layer for model in manager.models if model.draft for layer in model.layers]
    return RankStatus(
        backend=manager.memory.name,
        num_layers=len(layers),
        num_experts=sum(layer.num_experts for layer in layers),
        resident_experts=sum(int((share == 1).sum()) for share in shares),
        partly_resident_experts=sum(int(_is_partly(share).sum()) for share in shares),
        offloaded_experts=sum(int((share == 0).sum()) for share in shares),
        resident_bytes=sum(layer.resident_bytes for layer in layers),
        offloaded_bytes=sum(layer.offloaded_bytes for layer in layers),
        plain_bytes=sum(layer.plain_bytes for layer in layers),
        slots=_slot_status(layers, ledger),
        draft_layers=len(draft),
        draft_bytes=sum(layer.resident_bytes for layer in draft),
        draft_offloaded_bytes=sum(layer.offloaded_bytes for layer in draft),
        draft_hit_rate=hit_rate_of(drafting),
        draft_zero_copy_bytes=sum(int(ledger.zero_copy_bytes.sum()) for ledger in drafting),
        layers=[_layer_status(layer, ledger, index, int(taken[index])) for index, layer in enumerate(layers)],
        resident_ids=[_ids(layer, share == 1) for layer, share in zip(layers, shares, strict=True)],
        partly_resident_ids=[_ids(layer, _is_partly(share)) for layer, share in zip(layers, shares, strict=True)],
        tokens=manager.tokens,
        warmup_done=manager.chooser.warm,
        adapt=manager.config.adapt,
        routed=int(ledger.routed.sum()),
        hit_rate=ledger.hit_rate,
        byte_hit_rate=ledger.byte_hit_rate,
        hit_rate_before=before,
        hit_rate_since=since,
        zero_copy_bytes=int(ledger.zero_copy_bytes.sum()),
        streamed_bytes=int(ledger.streamed_bytes.sum()),
        moves=ledger.moves,
        moved_bytes=ledger.moved_bytes,
        moving_seconds=ledger.moving_seconds,
        moving=manager.worker.moving,
        fault=manager.fault,
        paused=manager.paused,
        history=manager.history.past(manager.tokens),
        curve=hit_rate_curve(ledger.counted, manager.target),
        profile=manager.chooser.profile_verdict,
        evicted_bytes=manager.evictions.evicted_bytes,
        link=manager.link,
        plugin_version=__version__,
    )


def _around_choice(now: tuple[int, float], at: tuple[int, float] | None) -> tuple[float | None, float | None]:
    """The hit rate until residents were chosen, and since; ``(routed, of them resident)`` now and then."""
    if at is None:
        return None, None
    parts = (at, (now[0] - at[0], now[1] - at[1]))
    before, since = (min(1.0, max(0.0, hits / routed)) if routed else None for routed, hits in parts)
    return before, since


def _slot_status(layers: Sequence[ExpertLayer], ledger: Ledger) -> SlotStatus | None:
    a_layer = max((layer.num_slots for layer in layers), default=0)
    if not a_layer:
        return None
    return SlotStatus(
        a_layer=a_layer,
        nbytes=sum(layer.slot_bytes for layer in layers),
        missing=next((f"{la.slots_missing} of MoE layer {la.layer_id}" for la in layers if la.slots_missing), None),
        hits=int(ledger.slot_hits.sum()),
        fills=int(ledger.slot_fills.sum()),
        bypasses=int(ledger.slot_bypasses.sum()),
        filled_bytes=int(ledger.filled_bytes.sum()),
        kept=int(ledger.slot_kept.sum()),
    )


def _resident_share(layer: ExpertLayer) -> np.ndarray:
    """float ``[num_experts]``: the share of each expert that is in VRAM."""
    return 1.0 - layer.offloaded_bytes_by_expert / max(layer.expert_bytes, 1)


def _is_partly(share: np.ndarray) -> np.ndarray:
    return (share > 0) & (share < 1)


def _ids(layer: ExpertLayer, experts: np.ndarray) -> list[int]:
    """The checkpoint's ids of ``experts`` (``bool[num_experts]``); those of fused shared experts follow."""
    where = layer.location
    end = where.places.stop if where.is_trivial else where.num_experts
    every = np.concatenate([where.ids, end + np.arange(layer.num_experts - len(where.places))])
    return every[experts].tolist()


def _layer_status(layer: ExpertLayer, ledger: Ledger, index: int, taken: int) -> LayerStatus:
    """``taken``: VRAM of what can be offloaded."""
    shared = int(layer.always_resident.sum())
    return LayerStatus(
        layer=layer.layer_id,
        first_expert=layer.first_expert,
        experts=layer.num_experts - shared,
        shared_experts=shared,
        expert_ids=[] if layer.location.is_trivial else layer.location.ids.tolist(),
        expert_bytes=layer.expert_bytes,
        resident_bytes=taken,
        routed=int(ledger.routed[index]),
        routed_resident=round(ledger.routed_resident[index]),
        activations=int(ledger.activations[index]),
        activations_resident=round(ledger.activations_resident[index]),
        zero_copy_bytes=int(ledger.zero_copy_bytes[index]),
        streamed_bytes=int(ledger.streamed_bytes[index]),
    )

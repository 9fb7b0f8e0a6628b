"""Filling the status record of one rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.residency.history import hit_rate_curve
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.status import LayerStatus, RankStatus


def rank_status(manager: OffloadManager) -> RankStatus:
    """The status of a rank, up to the last step launched. Waits for the device."""
    manager.observer.catch_up()
    layers, ledger = manager.target.layers, manager.ledger
    draft = [layer for model in manager.models if model.draft for layer in model.layers]
    return RankStatus(
        backend=manager.memory.name,
        num_layers=len(layers),
        num_experts=sum(layer.num_experts for layer in layers),
        resident_experts=int(sum(layer.resident.sum() for layer in layers)),
        offloaded_experts=int(sum((~layer.resident).sum() for layer in layers)),
        resident_bytes=sum(layer.resident_bytes for layer in layers),
        offloaded_bytes=sum(layer.offloaded_bytes for layer in layers),
        plain_bytes=sum(layer.plain_bytes for layer in layers),
        stranded_bytes=sum(layer.stranded_bytes for layer in layers) if manager.config.residents_change else 0,
        draft_layers=len(draft),
        draft_bytes=sum(layer.resident_bytes for layer in draft),
        layers=[_layer_status(layer, ledger, index) for index, layer in enumerate(layers)],
        resident_ids=_resident_ids(layers),
        tokens=manager.tokens,
        warmup_done=manager.warm,
        adapt=manager.config.adapt,
        routed=int(ledger.routed.sum()),
        hit_rate=ledger.hit_rate,
        zero_copy_bytes=int(ledger.zero_copy_bytes.sum()),
        moves=ledger.moves,
        moved_bytes=ledger.moved_bytes,
        moving_seconds=ledger.moving_seconds,
        fault=manager.fault,
        history=manager.history.past(manager.tokens),
        curve=hit_rate_curve(ledger.counted, layers),
        profile=manager.profile_verdict,
    )


def _resident_ids(layers: Sequence[ExpertLayer]) -> list[list[int]]:
    return [(np.flatnonzero(layer.resident) + layer.first_expert).tolist() for layer in layers]


def _layer_status(layer: ExpertLayer, ledger: Ledger, index: int) -> LayerStatus:
    shared = int(layer.always_resident.sum())
    return LayerStatus(
        layer=layer.layer_id,
        first_expert=layer.first_expert,
        experts=layer.num_experts - shared,
        shared_experts=shared,
        expert_bytes=layer.expert_bytes,
        routed=int(ledger.routed[index]),
        routed_resident=int(ledger.routed_resident[index]),
        activations=int(ledger.activations[index]),
        activations_resident=int(ledger.activations_resident[index]),
        zero_copy_bytes=int(ledger.zero_copy_bytes[index]),
    )

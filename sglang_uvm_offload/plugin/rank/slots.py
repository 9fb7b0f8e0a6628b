"""Creates a rank's slots, once its experts are loaded."""

from __future__ import annotations

import logging

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.slots.runners import no_slots_in
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.streaming.slots import ModelSlots

logger = logging.getLogger(__name__)


def make_slots(model: ModelExperts, backend: Emulated) -> ModelSlots | None:
    """The slots, or None if no layer has any. Call this after the counters are created."""
    counters = model.counters
    if counters is None or not any(layer.num_slots for layer in model.layers):
        return None
    slots = ModelSlots(model.layers, lambda layers: backend.slots(counters, layers), lambda layer: _without(layer, backend))
    for reason in sorted({reason for reason in slots.reasons if reason is not None}):
        ids = [layer.layer_id for layer, why in zip(model.layers, slots.reasons, strict=True) if why == reason]
        logger.warning(
            "Expert offload: %d of %d MoE layers (the first is %d) have no slots: %s",
            len(ids),
            len(model.layers),
            ids[0],
            reason,
        )
    return slots if slots.any else None


def _without(layer: ExpertLayer, backend: Emulated) -> str | None:
    return no_slots_in(layer.holders[0]) if backend.on_cuda else None

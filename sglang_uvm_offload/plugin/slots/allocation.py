"""Creates a rank's slots, once its experts are loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang.srt.runtime_context import get_device

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.memory.slots import ExpertSlots, SlotLayer
from sglang_uvm_offload.plugin.slots.runners import no_slots_in
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import RoutingCounters
from sglang_uvm_offload.streaming.slots import ModelSlots

logger = logging.getLogger(__name__)


def make_slots(model: ModelExperts) -> ModelSlots | None:
    """The slots, or None if no layer has any. Call this after the counters are created."""
    counters = model.counters
    if counters is None or not any(layer.num_slots for layer in model.layers):
        return None
    slots = ModelSlots(model.layers, lambda layers: _on_device(counters, layers), _without)
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


def _without(layer: ExpertLayer) -> str | None:
    module = layer.holders[0]
    return no_slots_in(module) if get_device().device == "cuda" else None


def _on_device(counters: RoutingCounters, layers: Sequence[SlotLayer | None]) -> ExpertSlots:
    if isinstance(counters, CpuRoutingCounters):
        return CpuSlots(counters, layers)
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.cuda.slots import CudaSlots

    assert isinstance(counters, CudaRoutingCounters)
    return CudaSlots(counters, layers)

"""Creates a rank's stream buffers and slots, after its experts are loaded and before SGLang sizes the KV cache."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.memory.slots import Guess
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.slots.runners import no_slots_in
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.status import StreamStatus
from sglang_uvm_offload.streaming.model_slots import NOT_ASKED, ModelSlots
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)


def make_streamer(
    config: OffloadConfig,
    backend: Emulated,
    memory: Memory,
    layers: list[ExpertLayer],
    slots: ModelSlots | None,
    on_copy: Callable[[int, int], None],
) -> Streamer | None:
    """The streamer, or None if nothing streams. Raises ``FlagError`` if its buffers cannot be allocated."""
    if not config.streams or not (config.residents_change or any(layer.offloaded_bytes for layer in layers)):
        return None
    room = [slots is not None and slots.has_room(index) for index in range(len(layers))]
    nbytes = max((buffer_bytes(layer) for layer, in_slots in zip(layers, room, strict=True) if not in_slots), default=0)
    count = config.stream_buffers if nbytes else 0
    if any(room) and not count:
        return Streamer(layers, None, slots, config.stream_tokens, on_copy)
    if not nbytes:
        return None
    if not count:
        logger.warning(
            "Expert offload: no VRAM for a stream buffer next to the KV cache: long prompts will be slow, because they read "
            "offloaded experts in place once per block of rows. Keep fewer experts resident to make room; %s sets the size.",
            flag_name("stream_buffer_gb"),
        )
        return None
    try:
        staging = backend.staging(memory, nbytes, count)
    except torch.OutOfMemoryError as full:
        flag = flag_name("stream_buffer_gb")
        raise FlagError([f"{flag}: cannot allocate {count} buffers of {size(nbytes)}: {full}"]) from full
    return Streamer(layers, staging, slots, config.stream_tokens, on_copy)


def stream_status(streamer: Streamer | None) -> StreamStatus | None:
    if streamer is None:
        return None
    return StreamStatus(streamer.buffers, streamer.nbytes, streamer.min_tokens, streamer.fault)


def make_slots(
    model: ModelExperts, backend: Emulated, guess: Callable[[int, torch.Tensor], Guess | None] | None
) -> ModelSlots | None:
    """The slots, or None if no layer has any. Call this after the counters are created and the slots are placed. ``guess`` is
    passed to ``ModelSlots``."""
    counters = model.counters
    if counters is None or not any(layer.num_slots or layer.pool or layer.without_pool for layer in model.layers):
        return None
    make = functools.partial(backend.slots, counters, guess is not None)
    slots = ModelSlots(model.layers, make, lambda layer: _without(layer, backend), guess)
    for reason in sorted({reason for reason in slots.reasons if reason not in (None, NOT_ASKED)}):
        ids = [layer.layer_id for layer, why in zip(model.layers, slots.reasons, strict=True) if why == reason]
        logger.warning(
            "Expert offload: %d of %d MoE layers (first: %d) have no slots: %s",
            len(ids),
            len(model.layers),
            ids[0],
            reason,
        )
    return slots if slots.any else None


def _without(layer: ExpertLayer, backend: Emulated) -> str | None:
    return no_slots_in(layer.holders[0]) if backend.on_cuda else None

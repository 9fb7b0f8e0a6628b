"""Creates a rank's stream buffers, once its experts are loaded and before SGLang sizes the KV cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.memory.staging import Staging
from sglang_uvm_offload.plugin.launch.stream_settings import warn_of_no_room
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.residency.status import StreamStatus
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer
from sglang_uvm_offload.units import size

_GB = flag_name("stream_buffer_gb")


def make_streamer(
    config: OffloadConfig,
    backend: Emulated,
    memory: Memory,
    layers: list[ExpertLayer],
    on_copy: Callable[[int, int], None],
) -> Streamer | None:
    """The streamer, or None if nothing streams. Raises ``FlagError`` if its buffers cannot be allocated."""
    nbytes, count = max(map(buffer_bytes, layers), default=0), config.stream_buffers
    if not nbytes or not config.streams or not (config.residents_change or any(layer.offloaded_bytes for layer in layers)):
        return None
    if not count:
        warn_of_no_room()
        return None
    return Streamer(layers, _staging(backend, memory, nbytes, count), config.stream_tokens, on_copy)


def _staging(backend: Emulated, memory: Memory, nbytes: int, count: int) -> Staging:
    try:
        return backend.staging(memory, nbytes, count)
    except torch.OutOfMemoryError as full:
        raise FlagError([f"{_GB}: {count} buffers of {size(nbytes)} could not be allocated: {full}"]) from full


def stream_status(streamer: Streamer | None) -> StreamStatus | None:
    if streamer is None:
        return None
    return StreamStatus(streamer.buffers, streamer.nbytes, streamer.min_tokens, streamer.fault)

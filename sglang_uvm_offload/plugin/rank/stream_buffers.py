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
from sglang_uvm_offload.sizing.streaming import MOST_BUFFERS, buffers_in
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer
from sglang_uvm_offload.units import size

_GB = flag_name("stream_buffer_gb")
_GIB = 1 << 30


def make_streamer(
    config: OffloadConfig,
    backend: Emulated,
    memory: Memory,
    layers: list[ExpertLayer],
    room: int | None,
    on_copy: Callable[[int, int], None],
) -> Streamer | None:
    """The streamer, or None if nothing streams. ``room``: the VRAM left for buffers and KV cache, None for no limit. Raises
    ``FlagError`` if the buffers that the user asked for do not fit."""
    nbytes = max(map(buffer_bytes, layers), default=0)
    if not nbytes or not config.streams or not (config.residents_change or any(layer.offloaded_bytes for layer in layers)):
        return None
    count = _number(config, nbytes, room)
    if not count:
        return None
    return Streamer(layers, _staging(backend, memory, nbytes, count), config.stream_tokens, on_copy)


def _number(config: OffloadConfig, nbytes: int, room: int | None) -> int:
    if config.stream_gb is not None:
        given = f"{_GB} {config.stream_gb:g}"
        count = buffers_in(config.stream_gb, nbytes)
        if not count:
            raise FlagError([f"{given}: the largest layer takes {size(nbytes)}; give at least that, auto, or 0"])
        if room is not None and count * nbytes > room:
            raise FlagError(
                [f"{given}: buffers of {size(count * nbytes)} do not fit in the {size(max(room, 0))} that are left"]
            )
        return count
    if config.stream_buffers is not None:
        count = config.stream_buffers
    elif room is None:
        count = MOST_BUFFERS
    else:  # the need of the KV cache is unknown: leave it half
        count = min(MOST_BUFFERS, max(room, 0) // 2 // nbytes)
    if room is not None:
        count = min(count, max(room, 0) // nbytes)
    if not count:
        warn_of_no_room()
    return count


def _staging(backend: Emulated, memory: Memory, nbytes: int, count: int) -> Staging:
    try:
        return backend.staging(memory, nbytes, count)
    except torch.OutOfMemoryError as full:
        raise FlagError([f"{_GB}: {count} buffers of {size(nbytes)} could not be allocated: {full}"]) from full


def stream_status(streamer: Streamer | None) -> StreamStatus | None:
    if streamer is None:
        return None
    return StreamStatus(streamer.buffers, streamer.nbytes, streamer.min_tokens, streamer.fault)


def room_in_vram(memory: Memory, before_load: float, fraction: float) -> int | None:
    """The bytes that SGLang may still give to buffers and KV cache, None on a CPU. ``before_load``: GiB that were free before
    the weights were loaded."""
    if memory.device_type == "cpu":
        return None
    return memory.info().device_free - int(before_load * _GIB * (1 - fraction))

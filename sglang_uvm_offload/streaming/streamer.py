"""Streams the experts of one model: decides which steps stream, and handles each of their layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.memory.protocol import ManagedMemoryError
from sglang_uvm_offload.memory.staging import Staging
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.replicas import Replicas
from sglang_uvm_offload.streaming.schedule import BufferSchedule, Copy

logger = logging.getLogger(__name__)

_GOES_ON = "Serving continues and outputs are unaffected, but long prompts read offloaded experts in place and are slower."

IN_SLOTS = "in slots"
"""Returned by ``Streamer.enter`` for a layer that reads its offloaded experts from slots."""


class Reading(NamedTuple):
    """A layer computing from a stream buffer."""

    row: int
    buffer: int
    own: list[torch.Tensor]
    """The layer's tensors in managed memory."""
    replicas: Replicas
    references: int
    """References to the buffer before the layer was pointed at it."""


class Streamer:
    """Copies each layer's experts to VRAM one layer ahead, in steps with many tokens. If the layer has enough slots, its
    offloaded experts go to slots; else all of its experts go to a stream buffer.

        streamer.begin_step()
        reading = streamer.enter(row)
        ...  # compute the layer
        if isinstance(reading, Reading):
            streamer.leave(reading)
        streamer.end_step()

    All methods run on the thread that launches the model's steps. A fault ends streaming; steps then read in place."""

    def __init__(
        self,
        layers: Sequence[ExpertLayer],
        staging: Staging | None,
        slots: ModelSlots | None,
        min_tokens: int,
        on_copy: Callable[[int, int], None],
    ):
        """``layers`` are the model's MoE layers in forward order. ``staging`` is None without buffers. Steps with
        ``min_tokens`` or more tokens stream. ``on_copy(row, nbytes)`` is called when ``nbytes`` offloaded bytes of a layer
        start to cross the link to a buffer; copies to slots are counted on the device."""
        self.min_tokens = min_tokens
        self.fault: str | None = None
        """Why streaming has stopped, None while it works."""
        self._layers = layers
        self._staging = staging
        self._slots = slots
        self._on_copy = on_copy
        buffers = [] if staging is None else staging.buffers
        self._schedule = BufferSchedule(len(buffers))
        self._storages = [buffer.untyped_storage() for buffer in buffers]
        self._replicas: dict[int, Replicas] = {}
        self._brought: int | None = None
        """The layer whose experts this step last copied into slots."""
        self._active = False
        self._entered = False
        """Whether any layer of this step computed from a buffer or from slots."""
        self._warned = False
        for buffer in range(self.buffers):
            self._references(buffer)  # uses a private torch API: if torch changed it, fail at load

    @property
    def buffers(self) -> int:
        return 0 if self._staging is None else len(self._staging.buffers)

    @property
    def nbytes(self) -> int:
        return 0 if self._staging is None else sum(buffer.numel() for buffer in self._staging.buffers)

    def streams(self, tokens: int) -> bool:
        """Whether a step with this many tokens streams, unless a graph replays it."""
        return self.fault is None and tokens >= max(1, self.min_tokens) and self._may_copy()

    def _may_copy(self) -> bool:
        return (self._staging is None or self._staging.may_copy()) and (self._slots is None or self._slots.may_bring())

    def begin_step(self) -> None:
        """Start copying the first layer of a step that ``streams``. Call this before the launch, after ``begin_step`` of the
        slots."""
        self._active, self._entered = True, False
        self._schedule.forget()  # weights may have been updated since
        if self._staging is not None:
            self._staging.begin_step()
            self._copy(self._schedule.stage(self._following(-1)))
        self._bring(self._following_in_slots(-1))

    def end_step(self) -> None:
        """End a step that was launched or has failed."""
        if self._brought is not None:
            assert self._slots is not None
            self._slots.await_brought()  # the next step may write to any slot
            self._brought = None
        anything = self._following(-1) is not None or self._following_in_slots(-1) is not None
        if self._active and not self._entered and not self._warned and anything:
            self._warned = True
            logger.warning(
                "Expert offload: a step of %d tokens or more did not stream and read offloaded experts in place: its MoE "
                "runner bypasses apply of the quantisation method, or a graph replayed it",
                self.min_tokens,
            )
        self._active = False

    def enter(self, row: int) -> Reading | str | None:
        """Prepare a layer before it is computed. Returns ``IN_SLOTS`` if its experts are in slots, a ``Reading`` to pass to
        ``leave`` if it now points at a stream buffer, or None if it reads in place."""
        if not self._active or not self._may_copy():
            return None
        return self._enter_slots(row) if self._brings_to_slots(row) else self._enter_buffer(row)

    def _enter_slots(self, row: int) -> str | None:
        assert self._slots is not None
        self._slots.await_brought()
        if self._brought != row:  # the step skipped layers, or computes one again
            self._bring(row)
            self._slots.await_brought()
        self._bring(self._following_in_slots(row), beside=row)
        if self.fault is not None:
            return None
        self._entered = True
        return IN_SLOTS

    def _bring(self, row: int | None, beside: int | None = None) -> None:
        """Start copying a layer's experts into slots, without evicting the layer ``beside`` (by default, the last one
        copied)."""
        if row is None or self.fault is not None:
            return
        assert self._slots is not None
        try:
            self._slots.bring(row, self._brought if beside is None else beside)
            self._brought = row
        except ManagedMemoryError as failure:
            self._stop(str(failure), failure.with_outlook(_GOES_ON))

    def _enter_buffer(self, row: int) -> Reading | None:
        if self._staging is None or not self._brings(row):
            return None
        buffer, copies = self._schedule.enter(row, self._following(row))
        if buffer is None:
            self._copy(copies)
            return None
        if not self._copy(copies):
            self._schedule.leave(buffer, None)
            return None
        replicas, references = self._replicas_of(row), self._references(buffer)
        self._staging.acquire(buffer)  # before the layer points at the buffer, so that an error cannot leave it there
        own = replicas.put(buffer)
        if own is None:
            self._staging.release(buffer)
            self._schedule.leave(buffer, None)
            return None
        self._entered = True
        return Reading(row, buffer, own, replicas, references)

    def leave(self, reading: Reading, failed: bool = False) -> None:
        """Give a launched layer its own tensors back. ``failed``: the layer raised."""
        assert self._staging is not None
        reading.replicas.put_back(reading.buffer, reading.own)
        self._staging.release(reading.buffer)
        if not failed and self._references(reading.buffer) > reading.references:
            # Stop copying: the buffer then keeps this layer's experts, so the kept reference stays valid.
            layer_id = self._layers[reading.row].layer_id
            reason = f"the code of MoE layer {layer_id} keeps a reference to the stream buffer"
            self._stop(reason, f"{reason}. {_GOES_ON}")
        self._copy(self._schedule.leave(reading.buffer, self._following(reading.row)))

    def _copy(self, copies: Sequence[Copy]) -> bool:
        """Start ``copies``. Returns whether all were started."""
        assert self._staging is not None
        for row, buffer in copies:
            if self.fault is not None:
                return False
            try:
                self._staging.copy(buffer, self._replicas_of(row).parts, self._layers[row].blocks_in_vram)
            except ManagedMemoryError as failure:
                self._stop(str(failure), failure.with_outlook(_GOES_ON))
                return False
            self._on_copy(row, self._layers[row].offloaded_bytes)
        return True

    def _stop(self, reason: str, message: str) -> None:
        """End streaming. ``message`` is the reason and its consequence."""
        self.fault, self._active = reason, False
        if self._slots is not None:
            self._slots.await_brought()  # layers that are no longer entered may read these slots
        logger.error("Expert offload: streaming stopped: %s", message)

    def _following(self, row: int) -> int | None:
        return next((after for after in range(row + 1, len(self._layers)) if self._brings(after)), None)

    def _brings(self, row: int) -> bool:
        """Whether a layer has offloaded experts and fits a buffer."""
        if self._staging is None or self._brings_to_slots(row):
            return False
        return bool(self._layers[row].offloaded_bytes) and bool(self._replicas_of(row).parts)

    def _following_in_slots(self, row: int) -> int | None:
        return next((after for after in range(row + 1, len(self._layers)) if self._brings_to_slots(after)), None)

    def _brings_to_slots(self, row: int) -> bool:
        return self._slots is not None and self._slots.brings(row)

    def _replicas_of(self, row: int) -> Replicas:
        found = self._replicas.get(row)
        if found is None or not found.valid():
            assert self._staging is not None
            found = self._replicas[row] = Replicas(self._layers[row], self._staging.buffers)
        return found

    def _references(self, buffer: int) -> int:
        count: int = torch._C._storage_Use_Count(self._storages[buffer]._cdata)
        return count

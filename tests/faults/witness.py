"""Looks at the experts in a scheduler of a real engine over the stand-in driver, after each step: all their bytes at their own
addresses, and their copies in slots. When a layer of a step that streams begins, it looks at those in the buffer, or the slots,
that the layer reads. It makes no CUDA call, for all memory is the host's. Installed by a plugin of SGLang's own kind."""

from __future__ import annotations

import ctypes
import re
import zlib
from typing import Any, NamedTuple

WRONG = "Wrong bytes: "


class Look(NamedTuple):
    """What the scheduler saw."""

    checksum: str
    """Over the bytes of all experts."""
    managed_bytes: int
    failures: int
    """CUDA calls that were made to fail."""

    def __str__(self) -> str:
        return f"Look: {self.checksum} {self.managed_bytes} {self.failures} end"


def looks(log: str) -> list[Look]:
    """The looks in a log: one per step that saw something else than the step before."""
    return [Look(one, int(two), int(three)) for one, two, three in re.findall(r"Look: (\w+) (\d+) (\d+) end", log)]


class Witness:
    def __init__(self) -> None:
        from faults.rank import Standin

        self.standin = Standin()
        self.manager: Any = None
        self.slots: Any = None
        self.last: Look | None = None

    def look(self) -> None:
        total = 0
        for model in self.manager.models:
            for layer in model.layers:
                for tensor in layer.tensors:
                    total = zlib.crc32(memory(tensor.address, tensor.layout.nbytes), total)
        if self.slots is not None and self.slots.any:
            self._look_at_slots()
        seen = Look(f"{total:08x}", self.standin.managed_bytes, self.standin.failures)
        if seen != self.last:
            self.last = seen
            print(seen, flush=True)

    def _look_at_slots(self) -> None:
        for index, (served, reason) in enumerate(zip(self.slots._served, self.slots.reasons, strict=True)):
            if served is not None and reason is None:
                self.look_at_slots_of(index)

    def look_at_slots_of(self, index: int) -> None:
        served = self.slots._served[index]
        for expert, slot in enumerate(self.held(index)):
            for row in served.rows if slot else ():
                own, copy = row.address + expert * row.nbytes, row.address + (served.first_slot + slot - 1) * row.nbytes
                if memory(own, row.nbytes) != memory(copy, row.nbytes):
                    print(f"{WRONG}slot {slot - 1}, layer {index}, expert {expert}", flush=True)

    def held(self, index: int) -> list[int]:
        """The slot of each expert of a layer with slots, plus one."""
        state, experts = self.slots._device._states[index], self.slots.layers[index].num_experts
        return list((ctypes.c_int32 * experts).from_address(state.pool.slot_of[state.at].data_ptr()))

    def look_at_brought(self, index: int) -> None:
        """A layer is about to read all offloaded experts from slots."""
        self.look_at_slots_of(index)
        for expert, (slot, share) in enumerate(zip(self.held(index), self.shares(index), strict=True)):
            if share and not slot:
                print(f"{WRONG}layer {index} streams, and expert {expert} is in no slot", flush=True)

    def shares(self, index: int) -> list[int]:
        """How much of each expert is offloaded, as slots know it."""
        state, experts = self.slots._device._states[index], self.slots.layers[index].num_experts
        return list((ctypes.c_uint8 * experts).from_address(state.share.data_ptr()))

    def look_at_buffer(self, streamer: Any, reading: Any) -> None:
        begin = streamer._staging.buffers[reading.buffer].data_ptr()
        for part in reading.replicas.parts:
            if memory(part.managed.address, part.nbytes) != memory(begin + part.offset, part.nbytes):
                print(f"{WRONG}stream buffer {reading.buffer}, layer {reading.row}", flush=True)


def memory(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_uvm_offload.residency.manager import OffloadManager

    witness = Witness()
    watch(witness)

    def end_step(manager: Any, *arguments: Any) -> None:
        ended(manager, *arguments)
        witness.manager = manager
        witness.look()

    def internal_state(*arguments: Any, **more: Any) -> Any:
        if witness.manager is not None:
            witness.look()
        return told(*arguments, **more)

    ended, told = OffloadManager.end_step, Scheduler.get_internal_state
    OffloadManager.end_step = end_step  # type: ignore[method-assign]
    Scheduler.get_internal_state = internal_state


def watch(witness: Witness) -> None:
    """What layers of steps that stream read."""
    from sglang_uvm_offload.streaming.model_slots import ModelSlots
    from sglang_uvm_offload.streaming.streamer import Reading, Streamer

    def make_slots(slots: Any, *arguments: Any, **more: Any) -> None:
        made(slots, *arguments, **more)
        witness.slots = slots

    def enter(streamer: Any, row: int) -> Any:
        reading = entered(streamer, row)
        if isinstance(reading, Reading):
            witness.look_at_buffer(streamer, reading)
        elif reading is not None:
            witness.look_at_brought(row)
        return reading

    made, entered = ModelSlots.__init__, Streamer.enter
    ModelSlots.__init__ = make_slots  # type: ignore[method-assign]
    Streamer.enter = enter  # type: ignore[method-assign]

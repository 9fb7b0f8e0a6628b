"""Looks at the experts in a scheduler of a real engine over the stand-in driver, after each step: all their bytes at their own
addresses, their copies in slots, and those in a stream buffer when a layer begins to read it. It makes no CUDA call, for all
memory is the host's. Installed by a plugin of SGLang's own kind."""

from __future__ import annotations

import ctypes
import re
import zlib
from typing import Any, NamedTuple

WRONG = "Wrong bytes: "


class Look(NamedTuple):
    """What the scheduler saw."""

    checksum: str
    """Of all experts."""
    managed_bytes: int
    failures: int
    """CUDA calls that were made to fail."""

    def __str__(self) -> str:
        return f"Look: {self.checksum} {self.managed_bytes} {self.failures} end"


def looks(log: str) -> list[Look]:
    """Those that a log shows; one a step, unless it saw the same as the one before."""
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
        for index, served in enumerate(self.slots._served):
            if served is None or self.slots.reasons[index] is not None:
                continue
            for expert, slot in enumerate(self.held(index)):
                for row in served.rows if slot else ():
                    own, copy = row.address + expert * row.nbytes, row.address + (served.num_experts + slot - 1) * row.nbytes
                    if memory(own, row.nbytes) != memory(copy, row.nbytes):
                        print(f"{WRONG}slot {slot - 1} of layer {index}, expert {expert}", flush=True)

    def held(self, index: int) -> list[int]:
        """The slot of each expert, plus one."""
        slot_of = None if self.slots is None else self.slots.slot_of(index)
        if slot_of is None:
            return []
        return list((ctypes.c_int32 * slot_of.numel()).from_address(slot_of.data_ptr()))

    def look_at_buffer(self, streamer: Any, reading: Any) -> None:
        begin, held = streamer._staging.buffers[reading.buffer].data_ptr(), self.held(reading.row)
        for part in reading.replicas.parts:
            for expert in range(part.nbytes // part.expert_bytes):
                offset = expert * part.expert_bytes
                own, copy = part.managed.address + offset, begin + part.offset + offset
                in_slot = held[expert : expert + 1] > [0]  # not copied: its slot is read
                if not in_slot and memory(own, part.expert_bytes) != memory(copy, part.expert_bytes):
                    print(f"{WRONG}stream buffer {reading.buffer}, layer {reading.row}, expert {expert}", flush=True)


def memory(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_uvm_offload.residency.manager import OffloadManager
    from sglang_uvm_offload.streaming.model_slots import ModelSlots
    from sglang_uvm_offload.streaming.streamer import Streamer

    witness = Witness()

    def end_step(manager: Any, *arguments: Any) -> None:
        ended(manager, *arguments)
        witness.manager = manager
        witness.look()

    def internal_state(*arguments: Any, **more: Any) -> Any:
        if witness.manager is not None:
            witness.look()
        return told(*arguments, **more)

    def make_slots(slots: Any, *arguments: Any, **more: Any) -> None:
        made(slots, *arguments, **more)
        witness.slots = slots

    def enter(streamer: Any, row: int) -> Any:
        reading = entered(streamer, row)
        if reading is not None:
            witness.look_at_buffer(streamer, reading)
        return reading

    ended, told, made, entered = OffloadManager.end_step, Scheduler.get_internal_state, ModelSlots.__init__, Streamer.enter
    OffloadManager.end_step = end_step  # type: ignore[method-assign]
    Scheduler.get_internal_state = internal_state
    ModelSlots.__init__ = make_slots  # type: ignore[method-assign]
    Streamer.enter = enter  # type: ignore[method-assign]

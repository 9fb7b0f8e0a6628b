"""Copies of layers over emulated memory."""

from __future__ import annotations

import torch

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.memory.protocol import ManagedRange
from sglang_uvm_offload.memory.staging import Part

NBYTES = 240


def managed(memory: EmulatedMemory, first: int) -> tuple[ManagedRange, torch.Tensor]:
    """Byte ``i`` is ``first + i``, modulo 256. The range lives as long as its tensor."""
    made = memory.allocate(NBYTES, f"from {first} on")
    tensor = memory.tensor(made)
    tensor[:NBYTES].copy_(torch.arange(first, first + NBYTES))
    return made, tensor


def test_a_copy_brings_all_bytes_of_all_parts_and_no_others():
    memory = EmulatedMemory()
    made = [managed(memory, first) for first in (0, 16)]
    (one, first), (other, second) = made
    staging = CpuStaging(memory, 2 * NBYTES, 2)
    for buffer in staging.buffers:
        buffer.fill_(7)
    staging.begin_step()
    staging.copy(1, [Part(one, 33, 0), Part(other, 100, NBYTES)])
    staging.acquire(1)
    untouched, copied = staging.buffers
    assert torch.equal(copied[:33], first[:33])
    assert torch.equal(copied[NBYTES : NBYTES + 100], second[:100])
    assert (copied[33:NBYTES] == 7).all()
    assert (copied[NBYTES + 100 :] == 7).all()
    assert (untouched == 7).all()

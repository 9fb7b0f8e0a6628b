"""Copying layers into plain VRAM beside the steps, on the stand-in driver: the bytes, and what a capture refuses."""

from __future__ import annotations

PREPARE = """
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.memory.staging import Part
memory, random = CudaMemory(), np.random.default_rng(0)
def managed(nbytes, place=HOST):
    made = memory.allocate(nbytes, f"tensor of {nbytes} bytes")
    held = memory.tensor(made)
    memory.place(made, [Span(0, nbytes)], place)
    held.copy_(torch.from_numpy(random.integers(0, 255, nbytes, dtype=np.uint8)))
    return made, held
def same(buffer, parts, held):
    pairs = [(buffer[part.offset :][: part.nbytes], bytes_[: part.nbytes]) for part, bytes_ in zip(parts, held)]
    return [bool(torch.equal(copied.cpu(), bytes_.cpu())) for copied, bytes_ in pairs]
"""


def test_a_copy_brings_all_bytes_of_all_parts_and_no_others(standin):
    ran = standin.run(
        PREPARE
        + """
sizes = [16, 17, 15, 128 << 10, (128 << 10) + 5, (128 << 10) - 16, (1 << 20) + 48] + [100] * 40
made = [managed(nbytes, DEVICE if index % 2 else HOST) for index, nbytes in enumerate(sizes)]
offsets = np.cumsum([0, *(-(-nbytes // 16) * 16 + 16 for nbytes in sizes)])
parts = [Part(one, nbytes - index % 3, int(at)) for index, ((one, _), nbytes, at) in enumerate(zip(made, sizes, offsets))]
staging = CudaStaging(0, int(offsets[-1]), 2)
for buffer in staging.buffers:
    buffer.copy_(torch.full(buffer.shape, 7, dtype=torch.uint8))
staging.begin_step()
staging.copy(1, parts)
staging.acquire(1)
torch.cuda.synchronize()
inside = np.zeros(int(offsets[-1]), dtype=bool)
for part in parts:
    inside[part.offset : part.offset + part.nbytes] = True
untouched = staging.buffers[1].cpu().numpy()[~inside]
print(json.dumps([all(same(staging.buffers[1], parts, [held for _, held in made])),
                  bool((untouched == 7).all()), bool((staging.buffers[0].cpu() == 7).all())]))
"""
    )
    assert ran.said == [True, True, True], ran.err
    kernels = [call for call in ran.calls if call.get("kernel") == "uvm_copy_kernel"]
    assert len(kernels) == 2  # one takes 32 tensors
    assert {call["stream"] for call in kernels} != {"(nil)"}


LAYER = """
import os
BLOCK, E, row = 2 << 20, 20, (300 << 10) + 16  # blocks hold parts of eight experts
parts, held, at = [], [], 0
for experts in (E, E):
    one, bytes_ = managed(E * row)
    parts.append(Part(one, E * row, at))
    held.append(bytes_)
    at += -(-E * row // BLOCK) * BLOCK
blocks = -(-E * row // BLOCK)
staging = CudaStaging(0, at, 1)
def copied(in_vram):
    staging.buffers[0].copy_(torch.full(staging.buffers[0].shape, 7, dtype=torch.uint8))
    staging.begin_step()
    staging.copy(0, parts, in_vram)
    staging.acquire(0)
    torch.cuda.synchronize()
    return [staging.buffers[0][part.offset :][: part.nbytes].cpu() for part in parts]
"""


def test_a_copy_is_right_whatever_is_said_to_be_in_vram(standin):
    """Too little of it, all of it, and blocks that no part has."""
    ran = standin.run(
        PREPARE
        + LAYER
        + """
said = []
for case in range(12):
    share = [0, 0.5, 0.9, 1][case % 4]
    count = [blocks, blocks - 2, blocks + 3][case % 3]
    found = copied([random.random(count) < share for _ in parts[: 1 + case % 2]])
    said.append(all(torch.equal(rows, known.cpu()[: E * row]) for rows, known in zip(found, held)))
print(json.dumps(said))
"""
    )
    assert ran.said == [True] * 12, ran.err


def test_what_is_in_vram_has_blocks_of_its_own(standin):
    """The first one alone brings just that, and then there is no more of it. Nothing is left to the others but the link."""
    ran = standin.run(
        PREPARE
        + LAYER
        + """
from sglang_uvm_offload.cuda.staging import LINK_BLOCKS
in_vram = [random.random(blocks) < 0.5 for _ in parts]
os.environ |= {"STANDIN_FIRST_BLOCK": str(LINK_BLOCKS), "STANDIN_BLOCKS": "1"}
wrong = 0
for found, known, mask in zip(copied(in_vram), held, in_vram):
    near = torch.from_numpy(mask[np.arange(E * row) // BLOCK])
    wanted = known.cpu()[: E * row]
    wrong += int((found != torch.where(near, wanted, torch.full_like(wanted, 7))).sum())
print(json.dumps([wrong, [int(mask.sum()) for mask in in_vram], blocks]))
"""
    )
    wrong, near, blocks = ran.said
    assert wrong == 0, ran.err
    assert 0 < sum(near) < 2 * blocks


def test_nothing_is_copied_while_the_caller_captures_a_graph(standin):
    ran = standin.run(
        PREPARE
        + """
one, held = managed(BLOCK)
staging = CudaStaging(0, BLOCK, 1)
before = staging.may_copy()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    during = staging.may_copy()
    try:
        staging.copy(0, [Part(one, one.nbytes, 0)])
        refused = ""
    except ManagedMemoryError as refusal:
        refused = str(refusal)
print(json.dumps([before, during, refused]))
"""
    )
    before, during, refused = ran.said
    assert (before, during) == (True, False)
    assert "tensor of 2097152 bytes" in refused
    assert "capturing a CUDA graph" in refused
    assert not [call for call in ran.calls if call.get("kernel") == "uvm_copy_kernel"]


def test_a_copy_that_fails_names_the_call_and_the_tensors(standin):
    program = (
        PREPARE
        + """
one, held = managed(BLOCK)
staging = CudaStaging(0, BLOCK, 1)
try:
    staging.copy(0, [Part(one, one.nbytes, 0)])
    print(json.dumps(None))
except ManagedMemoryError as failure:
    print(json.dumps([failure.call, str(failure)]))
"""
    )
    ran = standin.run(program)
    assert ran.said is None
    launches = [call["kernel"] for call in ran.calls if call["call"] == "cudaLaunchKernel"]
    call, message = standin.run(program, fail=f"cudaLaunchKernel:{launches.index('uvm_copy_kernel') + 1}:2").said
    assert call == "uvm_copy_layer"
    assert "tensor of 2097152 bytes" in message
    assert "cudaErrorMemoryAllocation" in message

"""Layers that stream, over the stand-in driver at random timings: no copy into a buffer before its last reader has ended, no
reader before its copy has, and none of the waits that order them is idle."""

from __future__ import annotations

import pytest
from standin.run import Standin
from standin.shuffled import Shuffled, named, run_shuffled

LAYERS, STEPS, TENSORS = 4, 2, 2
TIMINGS = 60

PROGRAM = """
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer
from sglang_uvm_offload.layer_shard import LayerShard
memory, layers, modules = CudaMemory(), [], []
versions = [[], []]
for index in range({layers}):
    layer = ExpertLayer(memory, LayerShard(index, 2))
    layer.place(lambda layout: np.zeros(layout.num_extents, dtype=bool))
    module = torch.nn.Module()
    with AllocationMode(2, layer.allocate):
        module.w13 = torch.nn.Parameter(torch.empty(2, PAGE, dtype=torch.uint8, device="cuda"), requires_grad=False)
        module.w2 = torch.empty(2, PAGE // 4, dtype=torch.int32, device="cuda")
    layer.sync_tensors(module)
    layers.append(layer)
    modules.append(module)
def values(version, index, like):
    seed = 100 * version + 10 * index + like.element_size()
    raw = np.random.default_rng(seed).integers(0, 255, like.numel() * like.element_size(), dtype=np.uint8)
    return torch.from_numpy(raw).view(like.dtype).view(like.shape)
weights = [[[values(version, index, t).cuda() for t in (modules[index].w13.data, modules[index].w2)]
            for index in range({layers})] for version in range({steps})]
seen = [[[torch.empty_like(t) for t in row] for row in step] for step in weights]
blank = [torch.zeros(t.shape, dtype=t.dtype).cuda() for t in weights[0][0]]
staging = CudaStaging(0, max(map(buffer_bytes, layers)), {buffers})
streamer = Streamer(layers, staging, 1, lambda row, nbytes: None)
filled, copy = [], staging.copy
def copy_and_tell(buffer, *rest):
    filled.append(buffer)
    copy(buffer, *rest)
staging.copy = copy_and_tell
{without}
def begin():
    filled.clear()
    for step in seen:
        for row in step:
            for it, zero in zip(row, blank):
                it.copy_(zero)
def work():
    with torch.cuda.stream(stream_a):
        for step in range({steps}):
            for module, (w13, w2) in zip(modules, weights[step]):  # an update of the weights, between the steps
                module.w13.data.copy_(w13)
                module.w2.copy_(w2)
            streamer.begin_step()
            for row in {rows}:
                reading = streamer.enter(row)
                assert reading is not None
                seen[step][row][0].copy_(modules[row].w13.data)
                seen[step][row][1].copy_(modules[row].w2)
                streamer.leave(reading)
            streamer.end_step()
def outcome():
    right = [bool(torch.equal(a.cpu(), b.cpu())) for step in range({steps}) for row in {rows}
             for a, b in zip(seen[step][row], weights[step][row])]
    firsts = [[buffer.data_ptr(), buffer.data_ptr() + buffer.numel()] for buffer in staging.buffers]
    return [all(right), firsts, filled.copy(), streamer.fault]
"""


def run(standin: Standin, buffers: int, rows: object = "range(4)", without: str = "") -> Shuffled:
    program = PROGRAM.format(layers=LAYERS, steps=STEPS, buffers=buffers, rows=rows, without=without)
    ran = run_shuffled(standin, program, seeds=TIMINGS)
    assert all(fault is None for *_, fault in ran.outcomes)
    return ran


def ordered(ran: Shuffled) -> set[bool]:
    """Whether the log proves, for each reader and each copy of a buffer that meet, that one is over before the other starts."""
    proven = set()
    for calls, (_, buffers, copied, _) in zip(ran.rounds, ran.outcomes, strict=True):
        ranges = [range(*buffer) for buffer in buffers]
        copies: list[list[dict]] = [[] for _ in ranges]
        readers: list[list[dict]] = [[] for _ in ranges]
        filled = iter(copied)
        for call in named(calls, "uvm_copy_kernel", "cudaMemcpyAsync"):
            kernel = call.get("kernel") == "uvm_copy_kernel"
            buffer = next(filled) if kernel else next((i for i, it in enumerate(ranges) if call["from"] in it), None)
            if buffer is None:
                continue
            pairs = [(reader, call) for reader in readers[buffer]] if kernel else [(copies[buffer][-1], call)]
            proven |= {ran.order.happens_before(*pair) for pair in pairs}
            (copies if kernel else readers)[buffer].append(call)
        assert sum(map(len, copies)) >= LAYERS
        assert sum(map(len, readers)) == STEPS * TENSORS * LAYERS
    return proven


@pytest.mark.parametrize("buffers", [1, 2])
def test_every_reader_has_its_own_bytes_at_each_timing(standin, buffers):
    ran = run(standin, buffers)
    assert {right for right, *_ in ran.outcomes} == {True}
    assert ordered(ran) == {True}


@pytest.mark.parametrize("rows", [[1, 3, 0, 2], [0, 0, 1, 1], [3, 2, 1, 0]], ids=str)
def test_rows_in_any_order_have_their_own_bytes_at_each_timing(standin, rows):
    assert {right for right, *_ in run(standin, 2, rows).outcomes} == {True}


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("wait", ["acquire", "release", "begin_step"])
def test_without_any_of_the_waits_some_reader_has_other_bytes(standin, buffers, wait):
    ran = run(standin, buffers, without=f"staging.{wait} = lambda *arguments: None")
    assert {right for right, *_ in ran.outcomes} == {True, False}
    if wait != "begin_step":  # which orders copies behind writes of managed memory
        assert False in ordered(ran)

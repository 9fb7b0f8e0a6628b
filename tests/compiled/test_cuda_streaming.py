"""Layers that stream, over the stand-in driver at random timings: no copy into a buffer or a slot before its last reader has
ended, no reader before its copy has, and none of the waits that order them is idle."""

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
streamer = Streamer(layers, staging, None, 1, lambda row, nbytes: None)
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


# ---- into slots ----

EXPERTS, SLOT_TIMINGS = 4, 30

SLOTS = """
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.pool import ExpertPool
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.routing.counts import Phase
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.streamer import IN_SLOTS, Streamer
L, E, S = {layers}, {experts}, 2 * {experts}
memory, layers, modules = CudaMemory(), [], []
pool = ExpertPool(memory, L, E, [PAGE, 2 * PAGE], S)
for index in range(L):
    layer = ExpertLayer(memory, LayerShard(index, E), index)
    layer.place(lambda layout: np.zeros(layout.num_extents, dtype=bool), num_slots=S)
    layer.join_pool(lambda sizes: pool)
    module = torch.nn.Module()
    with AllocationMode(E, layer.allocate):
        module.w13 = torch.empty(E, 2 * PAGE, dtype=torch.uint8, device="cuda")
        module.w2 = torch.empty(E, PAGE, dtype=torch.uint8, device="cuda")
    layer.sync_tensors(module)
    layers.append(layer)
    modules.append((module.w13, module.w2))
pool.place_slots(S)
counters = CudaRoutingCounters(L, E)
slots = ModelSlots(layers, lambda served, counts: CudaSlots(counters, served, counts))
assert slots.reasons == [None] * L
device, streamer = slots._device, Streamer(layers, None, slots, 1, lambda row, nbytes: None)
weights = [[[on_device(np.random.default_rng([version, index, t.stride(0)]).integers(0, 255, t.shape, dtype=np.uint8))
             for t in modules[index]] for index in range(L)] for version in range(2)]
STEPS = 4  # two versions of the weights, with which one step streams and one decodes
owners, padded = cells(*range(E)), cells(16 * E)
ids = [cells(*range(E)).view(E, 1), cells(0, 2, 3, 1).view(E, 1)]
blocks = [[cells(*range(E)) for _ in range(L)] for _ in range(STEPS)]
# What each layer reads from: its experts and all slots.
seen = [[[torch.zeros(E + S, t.size(1), dtype=torch.uint8, device="cuda") for t in row] for row in modules]
        for _ in range(STEPS)]
ending = False
def read(step, row):
    at = slots.at(modules[row][0].data_ptr())
    blocks[step][row].copy_(owners)
    at.resolve(ids[step % 2], BlockLists(blocks[step][row], padded, 16))
    for tensor, copy in zip(modules[row], seen[step][row]):
        copy[:E].copy_(tensor)
        copy[E:].copy_(at.all_rows(tensor)[at.first_slot :][: len(copy) - E])
{without}
def begin():
    pass
def work():
    global ending
    with torch.cuda.stream(stream_a):
        for step in range(STEPS):
            streams = step % 2 == 0
            if streams:
                for tensors, new in zip(modules, weights[step // 2]):
                    for tensor, values in zip(tensors, new):
                        tensor.copy_(values)
                slots.bytes_written()
            counters.begin_step(E, Phase.PREFILL if streams else Phase.DECODE)
            slots.begin_step(E, Phase.PREFILL if streams else Phase.DECODE, [(0, E)], streams=streams)
            if streams:
                streamer.begin_step()
            for row in {rows} if streams else range(L):
                assert streamer.enter(row) == (IN_SLOTS if streams else None)
                read(step, row)
            if streams:
                ending = True
                streamer.end_step()
                ending = False
def outcome():
    right, inside = True, True
    for step in range(STEPS):
        for row in {rows} if step % 2 == 0 else range(L):
            from_rows = blocks[step][row].cpu().long()
            slot = from_rows >= E
            inside &= step % 2 == 1 or bool(slot.all())
            from_rows = torch.where(slot, from_rows - slots.at(modules[row][0].data_ptr()).first_slot + E, from_rows)
            pairs = zip(seen[step][row], weights[step // 2][row])
            right &= all(torch.equal(copy.cpu()[from_rows], new.cpu()) for copy, new in pairs)
    return [right, inside, streamer.fault]
"""


def run_slots(standin: Standin, rows: object = "range(L)", without: str = "") -> Shuffled:
    program = SLOTS.format(layers=LAYERS, experts=EXPERTS, rows=rows, without=without)
    ran = run_shuffled(standin, program, seeds=SLOT_TIMINGS)
    assert all(fault is None for *_, fault in ran.outcomes)
    return ran


ORDERS = ("chosen", "noted", "come", "left", "ended")


def ordered_slots(ran: Shuffled) -> dict[str, set[bool]]:
    """Whether the log proves each order: choices before their copies, copies before the next choices and before all kernels
    that use slots from the next layer on, and these before later copies."""
    proven: dict[str, set[bool]] = {order: set() for order in ORDERS}

    def prove(order: str, first: dict | None, second: dict) -> None:
        if first is not None:
            proven[order].add(ran.order.happens_before(first, second))

    for calls in ran.rounds:
        choice = fill = resolved = None
        filled: list[dict] = []
        for call in named(
            calls, *(f"uvm_{name}_kernel" for name in ("begin_step", "bring_slots", "fill_slots", "resolve_slots"))
        ):
            match call["kernel"]:
                case "uvm_begin_step_kernel":
                    prove("ended", fill, call)
                case "uvm_bring_slots_kernel":
                    prove("noted", fill, call)
                    choice = call
                case "uvm_fill_slots_kernel":
                    prove("chosen", choice, call)
                    prove("left", resolved, call)
                    fill = call
                    filled.append(call)
                case _:
                    # All but the last one, which is for the next layer.
                    prove("come", filled[-2] if len(filled) > 1 else None, call)
                    resolved = call
        assert len(filled) >= 2 * (LAYERS - 1)
    return proven


ALL_ORDERED = {order: {True} for order in ORDERS}


@pytest.mark.parametrize("rows", ["range(L)", [0, 1, 2]], ids=str)
def test_every_layer_reads_its_experts_from_slots_at_each_timing(standin, rows):
    ran = run_slots(standin, rows)
    assert ran.outcomes == [[True, True, None]] * SLOT_TIMINGS
    assert ordered_slots(ran) == ALL_ORDERED


@pytest.mark.parametrize("rows", [[1, 3, 0, 2], [0, 2, 1, 3], [0, 0, 1, 1], [3, 2, 1, 0]], ids=str)
def test_layers_in_any_order_read_their_own_bytes_at_each_timing(standin, rows):
    ran = run_slots(standin, rows)
    assert {right for right, *_ in ran.outcomes} == {True}
    assert ordered_slots(ran) == ALL_ORDERED


NO_CHOICE = "device._stream.wait_stream = lambda stream: None"
NO_LAYER = "wait = slots.await_brought; slots.await_brought = lambda: wait() if ending else None"
NO_END = "wait = slots.await_brought; slots.await_brought = lambda: None if ending else wait()"


@pytest.mark.parametrize(("without", "order"), [(NO_CHOICE, "chosen"), (NO_LAYER, "come"), (NO_END, "ended")])
def test_without_any_wait_some_layer_reads_other_bytes(standin, without, order):
    ran = run_slots(standin, [0, 1, 2], without)
    assert {right for right, *_ in ran.outcomes} == {True, False}
    assert False in ordered_slots(ran)[order]


def test_a_layer_keeps_its_slots_while_the_next_one_comes(standin):
    """What it lost would be read in place: as right, but over the link."""
    ran = run_slots(standin, without="bring = device.bring; device.bring = lambda layer, beside: bring(layer, None)")
    assert {tuple(outcome) for outcome in ran.outcomes} == {(True, False, None)}

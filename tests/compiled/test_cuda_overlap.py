"""What only a layer's second GEMM reads comes to slots while the first one computes, over the stand-in driver: the log proves
each order, in a graph too, and without any one wait neither bytes nor orders are right."""

from __future__ import annotations

import pytest
from standin.order import Order
from standin.run import Standin
from standin.shuffled import Shuffled, named, run_shuffled

LAYERS, TIMINGS = 3, 60

PROGRAM = """
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
from sglang_uvm_offload.routing.counts import Phase
L, E, S, BYTES = {layers}, 4, 4, (64, 32)
tensors = [torch.zeros(L * E + S, n, dtype=torch.uint8, device="cuda") for n in BYTES]
for tensor in tensors:
    tensor[: L * E].copy_(torch.arange(1, L * E + 1, dtype=torch.uint8).view(-1, 1).expand(-1, tensor.size(1)))
def rows(layer):
    return [Rows(tensor.data_ptr() + layer * E * tensor.size(1), tensor.size(1)) for tensor in tensors]
counters = CudaRoutingCounters(L, E)
device = CudaSlots(counters, [SlotLayer(rows(layer), E, 0, (L - layer) * E) for layer in range(L)], [S])
device.set_share(np.full((L, E), 16, dtype="uint8"))
ids = cells(0, 1, 2).view(3, 1)
blocks, padded = [cells(0, 1, 2) for _ in range(L)], cells(48)
owners = cells(0, 1, 2)
blank = torch.zeros(1 << 10, dtype=torch.uint8).cuda()
seen = [[torch.zeros(E + S, tensor.size(1), dtype=torch.uint8, device="cuda") for tensor in tensors] for _ in range(L)]
{without}
def gemm(layer, which):
    # what a kernel may read: the layer's experts, and all slots
    table, copy = tensors[which], seen[layer][which]
    copy[:E].copy_(table[layer * E :][:E])
    copy[E:].copy_(table[L * E :])
def forward():
    for layer in range(L):
        blocks[layer].copy_(owners)
        device.resolve(layer, ids, BlockLists(blocks[layer], padded, 16), frozenset([rows(layer)[1].address]))
        gemm(layer, 0)
        assert device.await_fills()
        gemm(layer, 1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    forward()
def begin():
    device.reset()
    for table in tensors:
        table[L * E :].copy_(blank[: S * table.size(1)].view(S, -1))
    for state in device._states.values():
        state.fills.copy_(blank.view(torch.int32)[: state.fills.numel()])  # what the last round chose is the same
def work():
    with torch.cuda.stream(stream_a):
        counters.begin_step(3, Phase.DECODE)
        device.begin_step()
        graph.replay() if {replays} else forward()
def outcome():
    right, moved = True, False
    for layer in range(L):
        row = blocks[layer].cpu().long()
        moved |= bool((row >= E).any())
        at = torch.where(row >= E, row - (L - layer) * E + E, row)
        for copy in seen[layer]:
            right &= bool((copy.cpu()[at, 0] == torch.arange(3) + 1 + layer * E).all())
    return [right, moved]
"""

KERNELS = ("uvm_resolve_slots_kernel", "uvm_fill_slots_kernel", "cudaMemcpyAsync")


def run(standin: Standin, without: str = "", replays: bool = False) -> Shuffled:
    return run_shuffled(standin, PROGRAM.format(layers=LAYERS, without=without, replays=replays), seeds=TIMINGS)


def proven(order: Order, calls: list[dict]) -> dict[str, set[bool]]:
    """The orders that whole steps prove: a layer's choice before what it has copied, that before the second GEMM and the next
    choice, and not before the first GEMM."""
    found: dict[str, set[bool]] = {"chosen": set(), "come": set(), "next": set(), "beside": set()}
    for call in (calls := named(calls, *KERNELS)):
        if call.get("kernel") == "uvm_fill_slots_kernel":
            at = next(i for i, other in enumerate(calls) if other is call)
            assert calls[at - 1]["kernel"] == "uvm_resolve_slots_kernel"
            first, second, following = calls[at + 1 : at + 3], calls[at + 3 : at + 5], calls[at + 6 : at + 7]
            found["chosen"].add(order.happens_before(calls[at - 1], call))
            found["come"] |= {order.happens_before(call, read) for read in second}
            found["beside"] |= {not order.happens_before(call, read) for read in first}
            found["next"] |= {order.happens_before(call, choice) for choice in following if "kernel" in choice}
    return found


ALL = {order: {True} for order in ("chosen", "come", "next", "beside")}


def test_the_second_gemm_reads_what_came_beside_the_first_one_at_each_timing(standin):
    ran = run(standin)
    assert ran.outcomes == [[True, True]] * TIMINGS
    assert all(proven(ran.order, calls) == ALL for calls in ran.rounds)


NO_FORK = "device._stream.wait_stream = lambda stream: None"
NO_JOIN = "device.await_fills = lambda: True"


@pytest.mark.parametrize(("without", "orders"), [(NO_FORK, {"chosen"}), (NO_JOIN, {"come", "next"})])
def test_without_either_wait_some_gemm_reads_other_bytes(standin, without, orders):
    ran = run(standin, without)
    assert {right for right, _ in ran.outcomes} == {True, False}
    for calls in ran.rounds:
        found = proven(ran.order, calls)
        assert {order for order, all_proven in found.items() if all_proven != {True}} >= orders


def captured(ran: Shuffled) -> dict[str, set[bool]]:
    [graph] = {call["graph"] for call in named(ran.before, "uvm_resolve_slots_kernel")}
    return proven(Order(ran.before, graph), [call for call in ran.before if call.get("graph") == graph])


def test_a_graph_captures_the_same_orders_and_replays_them(standin):
    ran = run(standin, replays=True)
    assert ran.outcomes == [[True, True]] * TIMINGS
    assert captured(ran) == ALL
    assert captured(run(standin, NO_JOIN))["come"] == {False}


TRIED = """
from sglang_uvm_offload.cuda import overlap
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.ops import CudaOps
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
from sglang_uvm_offload.routing.counts import Phase
{before}
counters, tensors = CudaRoutingCounters(2, 2), [torch.zeros(6 * 64, dtype=torch.uint8).cuda() for _ in range(2)]
layer = SlotLayer([Rows(tensor.data_ptr(), 64) for tensor in tensors], 2, 0, 2)
slots = overlap.with_overlap(CudaSlots(counters, [layer] * 2, [4]))
slots.set_share(np.full((2, 2), 16, dtype="uint8"))
counters.begin_step(1, Phase.DECODE)
slots.begin_step()
ids, blocks, padded = (on_device(np.array(each, dtype="int32")) for each in ([[0, 1]], [0, 1], [32]))
waited = []
for index in range(2):
    slots.resolve(index, ids, BlockLists(blocks, padded, 16), frozenset([tensors[1].data_ptr()]))
    waited.append(slots.await_fills())
print(json.dumps([slots.overlaps, waited]))
"""
REFUSED = """
def refuse(*args, programmatic, launch=CudaOps.resolve_slots):
    if programmatic:
        raise CudaFailure("cudaLaunchKernelExC", 900, "cudaErrorStreamCaptureUnsupported", None)
    launch(*args, programmatic=programmatic)
CudaOps.resolve_slots = refuse
"""
OTHER_BYTES = "CudaOps.fill_slots = lambda *args: None"


@pytest.mark.parametrize(
    ("before", "why"), [("", None), (REFUSED, "CaptureUnsupported"), (OTHER_BYTES, "replayed wrong bytes")]
)
def test_slots_overlap_nothing_where_a_graph_does_not_replay_it(standin, before, why):
    ran = standin.run(TRIED.format(before=before))
    assert ran.said == [why is None, [why is None] * 2]
    warned = "all misses of a layer are filled before its first GEMM"
    assert (warned in ran.err, why is None or why in ran.err) == (why is not None, True)

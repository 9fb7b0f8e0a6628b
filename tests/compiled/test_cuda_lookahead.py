"""Experts that come ahead of a layer's routing, over the stand-in driver: each layer computes from its own experts' bytes,
whether these came whole, in part, too late or not at all, and as ``cpu/slots`` does where they came whole."""

from __future__ import annotations

import pytest
from standin.order import Order
from standin.run import Standin
from standin.shuffled import Shuffled, named, run_shuffled

LAYERS, EXPERTS, SLOTS, BYTES = 5, 24, 70, (70_000, 4, 33)
"""The first tensor has a unit of copying and more than another."""

PROGRAM = (
    f"""
L, E, S, BYTES = {LAYERS}, {EXPERTS}, {SLOTS}, {BYTES}
"""
    + """
from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.memory.slots import AHEAD_ROWS, BlockLists, Guess, Rows, SlotLayer
from sglang_uvm_offload.routing.counts import Phase
LAST, ROWS = "last", L * E + S
def cells(*values):
    return on_device(np.array(values, dtype=np.int32))
class Side:
    def __init__(self, make, counters, device):
        self.device, self.counters = device, counters(L, E)
        self.tensors = [torch.zeros(ROWS, n, dtype=torch.uint8, device=device) for n in BYTES]
        for tensor, n in zip(self.tensors, BYTES):
            values = np.random.default_rng(n).integers(1, 256, (L * E, n)).astype("uint8")
            tensor[: L * E].copy_(torch.from_numpy(values))
        served = [SlotLayer(self.rows(layer), E, 0, (L - layer) * E) for layer in range(L)]
        self.slots = make(self.counters, served, [S], ahead=True)
        self.slots.set_share(np.full((L, E), 16, dtype="uint8"))
    def rows(self, layer):
        return [Rows(t.data_ptr() + layer * E * t.size(1), t.size(1)) for t in self.tensors]
    def begin(self, rows, phase=Phase.DECODE, requests=None):
        self.counters.begin_step(rows, phase)
        self.slots.begin_step(requests)
    def resolve(self, layer, ids, late=True):
        # the rows that the experts of ids are computed from
        owners = np.unique(ids)
        blocks, padded = (torch.from_numpy(np.array(x, dtype="int32")).to(self.device) for x in (owners, [16 * len(owners)]))
        later = frozenset([self.rows(layer)[-1].address]) if late else frozenset()
        self.slots.resolve(layer, torch.from_numpy(ids).to(self.device), BlockLists(blocks, padded, 16), later)
        return owners, blocks
    def look_ahead(self, layer, ids, first=0):
        guessed = torch.from_numpy(ids).to(self.device)
        self.slots.look_ahead(layer, Guess(lambda: guessed, lambda logits: logits, first))
    def is_right(self, layer, owners, blocks):
        at = blocks.cpu().long() + layer * E
        tables = [tensor.cpu() for tensor in self.tensors]
        return all(bool(torch.equal(table[at], table[torch.from_numpy(owners).long() + layer * E])) for table in tables)
gpu = Side(CudaSlots, CudaRoutingCounters, "cuda")
device = gpu.slots
rng = np.random.default_rng(SEED)
popular = [rng.permutation(E) for _ in range(L)]
def routed(layer, rows):
    weight = np.where(np.argsort(popular[layer]) < 16, 10.0, 1.0)  # others than these seldom get a slot
    return np.stack([rng.choice(E, 8, replace=False, p=weight / weight.sum()) for _ in range(rows)])
def guessed(ids):
    # some are others, some are none
    out = np.where(rng.random(ids.shape) < 0.3, rng.integers(0, E, ids.shape), ids)
    return np.where(rng.random(ids.shape) < 0.1, rng.integers(E, E + 9, ids.shape), out)
"""
)

BOTH = (
    PROGRAM
    + """
cpu = Side(CpuSlots, CpuRoutingCounters, "cpu")
same, ahead, kept = True, 0, 0
for step in range(160):
    rows, phase = int(rng.integers(1, 4)), Phase.PREFILL if rng.random() < 0.1 else Phase.DECODE
    valid = int(rng.integers(0, rows + 1))
    for side in (cpu, gpu):
        side.counters.begin_step(valid, phase)
        if valid:
            side.slots.begin_step([(0, valid)] if phase is Phase.PREFILL else None)
    if step % 31 == 30:
        share = rng.choice([0, 5, 16], (L, E)).astype("uint8")
        cpu.slots.set_share(share), gpu.slots.set_share(share)
    routing = [routed(layer, rows) for layer in range(L)]
    order = list(range(L)) if rng.random() < 0.8 else [0, 1, 0, 1, 2, 3, 2, 4]  # some twice, as of two halves of a batch
    for layer in order:
        (owners, mine), (_, theirs) = (side.resolve(layer, routing[layer]) for side in (cpu, gpu))
        there, first = layer + 1, int(rng.choice([0, 7]))
        if there < L and rng.random() < 0.9:
            ids = guessed(routing[there]) + first
            cpu.look_ahead(there, ids, first), gpu.look_ahead(there, ids, first)
        same &= bool((mine == theirs.cpu()).all())
        device.await_fills()
        same &= not valid or cpu.is_right(layer, owners, mine) and gpu.is_right(layer, owners, theirs)
        kept += int((theirs.cpu() >= (L - layer) * E + S - 2 * AHEAD_ROWS).sum())
        device.end_layer(layer)
state = device._states[1]
same &= bool((cpu.slots.policy.slot_of[1] + 1 == state.pool.slot_of[1, :E].cpu().numpy()).all())
print(json.dumps([same, cpu.slots.gain(), device.gain(), kept]))
"""
)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_comes_ahead_is_what_the_cpu_takes_and_is_computed_from(standin, seed):
    same, cpu, gpu, kept = standin.run(BOTH.replace("SEED", str(seed))).said
    assert same
    assert cpu == gpu
    misses, brought, right = gpu
    assert 50 < right < brought < misses + brought
    assert kept > 10, "some experts got no slot, and were computed from where they came to"


PARTLY = (
    PROGRAM
    + """
blocks = device._ops.ahead_blocks
units = [-(-n // 32768) for n in BYTES]
right, rest, before = True, 0, device.gain()
for step in range(100):
    gpu.begin(2)
    for layer in range(L):
        ids = routed(layer, 2)
        if layer:
            state = device._states[layer]
            device._filling = True
            gpu.look_ahead(layer, guessed(ids))
            # As if they had stopped somewhere: what they have not copied is not there.
            words = state.ahead.words.cpu()
            done = words[-blocks:] & 0xFFFFFFFF
            copied = torch.minimum(done, torch.from_numpy(rng.integers(0, 2 if rng.random() < 0.5 else 9, blocks)))
            state.ahead.words[-blocks:].copy_(words[-blocks:] - done + copied)
            for unit in range(AHEAD_ROWS * sum(units)):
                if unit // blocks < copied[unit % blocks]:
                    continue
                row, at = divmod(unit, sum(units))
                tensor = next(i for i in range(len(BYTES)) if at < sum(units[: i + 1]))
                begin = (at - sum(units[:tensor])) * 32768
                poisoned = gpu.tensors[tensor][L * E + state.ahead.first + row, begin : begin + 32768]
                poisoned.copy_(torch.zeros(len(poisoned), dtype=torch.uint8))
            rest += int((copied < done).sum())
        owners, mine = gpu.resolve(layer, ids, late=rng.random() < 0.5)
        device.await_fills()
        right &= gpu.is_right(layer, owners, mine)
gain = device._gain.tolist()
print(json.dumps([right, rest, gain]))
"""
)


def test_what_came_in_part_is_brought_to_the_end(standin):
    right, rest, (_, brought, confirmed, used, cut, *_) = standin.run(PARTLY.replace("SEED", "3")).said
    assert right
    assert rest > 500
    assert 20 < confirmed < brought
    assert confirmed < used < 5 * confirmed
    assert cut > 0


ONE = (
    PROGRAM
    + """
ids, other = np.array([[3, 5]]), np.array([[1, 2]])
device._states[0].pool.taken.copy_(cells(device._states[0].pool.num_slots))  # nothing gets a slot
where = L * E + device._states[1].ahead.first
def layer_1():
    # whether experts 3 and 5 are computed from their bytes, and how many from where they came ahead to
    owners, blocks = gpu.resolve(1, ids)
    device.await_fills()
    return [gpu.is_right(1, owners, blocks), int((blocks.cpu() + E >= where).sum())]
def ahead(ids):
    gpu.resolve(0, other)
    gpu.look_ahead(1, ids)
def edit(tensor, change):
    tensor.copy_(change(tensor.cpu()))
gpu.begin(1)
ahead(ids)
"""
)
WORDS = "edit(device._states[1].ahead.words, lambda words: words - {} * (torch.arange(12) {}))"


def one(standin: Standin, what: str, **settings: object) -> list:
    said = standin.run(ONE.replace("SEED", "0") + what + "\nprint(json.dumps(layer_1()))", **settings).said
    assert isinstance(said, list)
    return said


@pytest.mark.parametrize(
    ("before", "computed"),
    [
        ("", 2),
        ("gpu.begin(1)\nfor t in gpu.tensors: edit(t[E : 2 * E], lambda rows: 255 - rows)", 0),
        ("ahead(other)", 0),
        (WORDS.format(1 << 32, ">= 4"), 0),
        (WORDS.format(1 << 32, "== 2"), 1),
        (WORDS.format(1, "== 0"), 0),
        ("layer_1()\nahead(ids)", 0),
    ],
    ids=[
        *("in time", "a step before", "others since", "copies of another launch", "an expert of another launch"),
        *("another layer's", "after it was resolved"),
    ],
)
def test_only_what_came_for_this_layer_in_this_step_is_computed_from(standin, before, computed):
    assert one(standin, before) == [True, computed]


KEPT = """
device._states[0].pool.taken.copy_(cells({taken}))
experts = [tensor.cpu()[[E + 3, E + 5]] for tensor in gpu.tensors]
for tensor in gpu.tensors:
    edit(tensor[E : 2 * E], torch.zeros_like)
_, blocks = gpu.resolve(1, ids)
device.await_fills()
at = blocks.cpu().long() + E
ring = int((at >= where).sum())
print(json.dumps([ring, [bool(torch.equal(t.cpu()[at], rows)) for t, rows in zip(gpu.tensors, experts)]]))
"""


@pytest.mark.parametrize(("taken", "computed"), [("device._states[0].pool.num_slots", 2), ("0", 0)], ids=["no slot", "a slot"])
def test_what_came_is_not_read_again_whether_it_gets_a_slot_or_not(standin, taken, computed):
    said = standin.run(ONE.replace("SEED", "0") + KEPT.format(taken=taken)).said
    assert said == [computed, [True] * 3]


def test_what_comes_too_late_is_left_out(standin):
    """Kernels of other streams run when something waits for them."""
    assert one(standin, "", late=2) == [True, 0]


PAUSE = """
state = device._states[1]
counted = []
for used, cut in (0, 0), (100, 4000), (100, 4000), (4000, 8100), (4000, 8100), (20000, 8100):
    device._gain[3:5].copy_(torch.tensor([used, cut]))
    ahead(ids)
    device.await_brought()
    edit(device._gain[7:], lambda rest: (rest - 65534).clamp(min=0))  # as many launches later
    counted.append([int((state.ahead.words.cpu()[2:4] & 4095 > 0).sum()), device._gain[7].item()])
    gpu.begin(1)
print(json.dumps(counted))
"""


def test_looking_ahead_pauses_where_it_is_in_the_way_of_more_than_it_saves(standin):
    """After a window of 4096 units that were used, or were on their way when a layer was resolved."""
    said = standin.run(ONE.replace("SEED", "0") + PAUSE).said
    assert said == [[2, 0], [0, 1], [0, 0], [0, 1], [0, 0], [2, 0]]


TURNS = (
    PROGRAM.replace(str(BYTES), "(64, 32)")
    + """
# No slot is free or given, so what came ahead is computed from where it came to. Layers take turns there.
ids, guess = cells(0, 1, 2).view(3, 1), cells(1, 2, 5).view(1, 3)
blocks, padded, owners = [cells(0, 1, 2) for _ in range(L)], cells(48), cells(0, 1, 2)
full, blank = cells(device._states[0].pool.num_slots), torch.zeros(1 << 14, dtype=torch.uint8).cuda()
seen = [[torch.zeros(E + S, t.size(1), dtype=torch.uint8).cuda() for t in gpu.tensors] for _ in range(L)]
{without}
def gemm(layer, which):
    table, copy = gpu.tensors[which], seen[layer][which]
    copy[:E].copy_(table[layer * E :][:E])
    copy[E:].copy_(table[L * E :])
def forward():
    for layer in range(L):
        blocks[layer].copy_(owners)
        device.resolve(layer, ids, BlockLists(blocks[layer], padded, 16), frozenset([gpu.rows(layer)[1].address]))
        if layer + 1 < L:
            device.look_ahead(layer + 1, Guess(guess.clone, lambda logits: logits, 0))
        gemm(layer, 0)
        device.await_fills()
        gemm(layer, 1)
        device.end_layer(layer)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    forward()
def begin():
    device.reset()
    device._states[0].pool.taken.copy_(full)
    for table in gpu.tensors:
        table[L * E :].copy_(blank[: S * table.size(1)].view(S, -1))
def work():
    with torch.cuda.stream(stream_a):
        gpu.begin(3)
        graph.replay() if {replays} else forward()
def outcome():
    right, ahead, late = True, 0, 0
    for layer in range(L):
        row = blocks[layer].cpu().long()
        ahead += int((row >= E).sum())
        if layer in (3, 4):  # whose turns were the last ones
            words = device._states[layer].ahead.words.cpu() & 0xFFFFFFFF
            late += int(not (row >= E).any() and words[2] > 0)
            right &= bool((row >= E).any() or not words[4:].any())  # what is chosen before, and copied after it, is nothing
        at = torch.where(row >= E, row - (L - layer) * E + E, row)
        for copy, table in zip(seen[layer], gpu.tensors):
            right &= bool(torch.equal(copy.cpu()[at], table.cpu()[layer * E :][:3]))
    return [right, ahead, late]
"""
)
TIMINGS = 60


def run(standin: Standin, without: str = "", replays: bool = False) -> Shuffled:
    program = TURNS.replace("SEED", "0").replace("{without}", without).replace("{replays}", str(replays))
    return run_shuffled(standin, program, seeds=TIMINGS)


def orders(order: Order, calls: list[dict]) -> dict[str, set[bool]]:
    """For copies ahead: whether they come after the GEMMs of the layer whose turn was the same, two layers before, and whether
    the layer that they are for waits for them. For guesses: whether their input was read before the second GEMM, which may
    write there."""
    resolves, copies, beside, reads = list[dict](), list[dict](), list[dict](), list[list[dict]]()
    for call in named(calls, "uvm_resolve_slots_kernel", "uvm_copy_ahead_kernel", "cudaMemcpyAsync"):
        if call.get("kernel") == "uvm_resolve_slots_kernel":
            resolves.append(call)
            reads.append([])
        elif call.get("kernel") == "uvm_copy_ahead_kernel":
            copies.append(call)
        elif reads:
            (reads[-1] if call["stream"] == resolves[0]["stream"] else beside).append(call)
    guesses = [call for call in beside if call["stream"] == copies[0]["stream"]]
    before = zip(copies[1:], reads, strict=False)  # the second one is for the third layer
    return {
        "turns": {order.happens_before(read, copy) for copy, gemms in before for read in gemms[:4]},
        "read": {order.happens_before(guess, gemms[2]) for guess, gemms in zip(guesses, reads[:-1], strict=True)},
        "waits": {order.happens_before(copy, resolve) for copy, resolve in zip(copies, resolves[1:], strict=True)},
    }


@pytest.mark.parametrize("replays", [False, True])
def test_layers_take_turns_and_wait_for_nothing_that_comes_ahead(standin, replays):
    ran = run(standin, replays=replays)
    assert {right for right, *_ in ran.outcomes} == {True}
    came = {ahead for _, ahead, _ in ran.outcomes}
    assert any(late for *_, late in ran.outcomes) != replays, "some were told to stop between the choice and the copies"
    assert came == {8} if replays else came > {0, 8}, "both of each layer but the first, or at some timings less"
    if replays:
        [graph] = {call["graph"] for call in named(ran.before, "uvm_resolve_slots_kernel")}
        rounds, order = [[call for call in ran.before if call.get("graph") == graph]], Order(ran.before, graph)
    else:
        rounds, order = ran.rounds, ran.order
    for calls in rounds:
        assert orders(order, calls) == {"turns": {True}, "read": {True}, "waits": {False}}


def test_without_its_wait_what_comes_ahead_overwrites_what_is_computed_from(standin):
    ran = run(standin, "device._stream.wait_stream = lambda stream: None")
    assert {right for right, *_ in ran.outcomes} == {True, False}
    assert any(orders(ran.order, calls)["turns"] != {True} for calls in ran.rounds)

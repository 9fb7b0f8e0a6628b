"""The kernels of the slots, run on the CPU by the stand-in driver: they decide as ``policy/slot_policy`` does, to the last bit,
and copy each byte to its place."""

from __future__ import annotations

import json

import pytest

from sglang_uvm_offload.memory.slots import MAX_EXPERTS
from sglang_uvm_offload.policy.slot_policy import MAX_FILLS

SAME = """
    from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
    from sglang_uvm_offload.cpu.slots import CpuSlots
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.cuda.slots import CudaSlots
    from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
    from sglang_uvm_offload.routing.counts import Phase

    rng = np.random.default_rng(SEED)
    layers, pools = LAYERS, POOLS
    width = max(E for E, _ in layers)
    experts = [sum(E for E, pool in layers if pool == index) for index in range(len(pools))]
    before = [sum(E for E, of in layers[:index] if of == pool) for index, (_, pool) in enumerate(layers)]

    def rows(pool, device):
        S, sizes = pools[pool]
        tensors = [torch.zeros((experts[pool] + S) * n, dtype=torch.uint8, device=device) for n in sizes]
        for tensor, n in zip(tensors, sizes):
            values = torch.from_numpy(np.random.default_rng(n).integers(1, 256, experts[pool] * n).astype("uint8"))
            tensor[: experts[pool] * n].copy_(values)
        return tensors

    held = [[rows(pool, device) for pool in range(len(pools))] for device in ("cpu", "cuda")]

    def own(mine, index):
        # a layer's tensors
        E, pool = layers[index]
        return [t[before[index] * n : (before[index] + E) * n] for t, n in zip(mine[pool], pools[pool][1])]

    counters = [kind(len(layers), width) for kind in (CpuRoutingCounters, CudaRoutingCounters)]
    slots = []
    for kind, mine, count in zip((CpuSlots, CudaSlots), held, counters):
        served = [
            None if pool is None else SlotLayer(
                [Rows(t.data_ptr(), n) for t, n in zip(own(mine, i), pools[pool][1])], E, pool, experts[pool] - before[i]
            )
            for i, (E, pool) in enumerate(layers)
        ]
        slots.append(kind(count, served, [S for S, _ in pools]))
    policy = slots[0].policy

    def share():
        whole = rng.integers(0, 4, (len(layers), width))
        return np.where(whole == 0, 0, np.where(whole == 1, rng.integers(1, 17, whole.shape), 16)).astype("uint8")

    popular = [rng.permutation(E) for E, _ in layers]
    first = share()
    for each in slots:
        each.set_share(first)
    served = [index for index, (_, pool) in enumerate(layers) if pool is not None]

    def holds(mine, index):
        # each of the layer's experts in a slot has its bytes there
        E, pool = layers[index]
        rows_of = torch.from_numpy(policy.slot_of[index])
        there = (rows_of >= 0).nonzero()[:, 0]
        right = True
        for tensor, n in zip(mine[pool], pools[pool][1]):
            table = tensor.cpu().view(-1, n)[before[index] :]
            right &= bool(torch.equal(table[there], table[experts[pool] - before[index] + rows_of[there]]))
        return right

    def bring(index, beside):
        global same, short, moved
        had, taken, pool = policy.slot_of.copy(), policy.taken[layers[index][1]], layers[index][1]
        for each in slots:
            each.bring(index, beside)
        wanted = int(((slots[0]._share[index] > 0) & policy.present[index] & (had[index] < 0)).sum()) * bool(valid)
        new = (had < 0) & (policy.slot_of >= 0)
        lost = (had >= 0) & (policy.slot_of < 0)
        same &= not np.delete(new, index, axis=0).any() and not lost[index].any()
        same &= beside is None or not lost[beside].any()
        short += new.sum() < wanted
        moved += bool(new.any()) and taken < policy.taken[pool] and bool(lost.any())
        return int(new.sum())

    def aligned(ids, block):
        # the order, the expert of each block, the rows in blocks, and the blocks of no expert
        groups = [(expert, np.flatnonzero(ids == expert)) for expert in np.unique(ids)]
        rows = [np.pad(each, (0, -len(each) % block), constant_values=ids.size) for _, each in groups]
        owners = np.concatenate([np.full(len(each) // block, expert) for (expert, _), each in zip(groups, rows)])
        return np.concatenate(rows).astype("int32"), owners.astype("int32"), [len(owners) * block, int((owners < 0).sum())]

    same, remapped, brought, made, late, bringing = True, 0, 0, 0, 0, False
    # Resolves that used up the free slots and evicted too, that evicted from other layers, and that filled as many as may be.
    ran_out = elsewhere = full = 0
    short = moved = 0  # times that not all could be brought, and that free slots and those of others were taken
    for step in range(STEPS):
        if step % 97 == 96:
            new = share()
            for each in slots:
                each.set_share(new)
        if step % 29 == 28:
            for each in slots:
                each.reset()
        brings = rng.random() < (0.6 if step % 29 == 0 else 0.2)  # soon after the slots were emptied
        phase = Phase.PREFILL if rng.random() < (0.8 if brings else 0.15) else Phase.DECODE
        size = int(rng.integers(1, 300 if phase is Phase.PREFILL and rng.random() < 0.5 else 5))
        valid = 0 if rng.random() < 0.05 else int(rng.integers(1, size + 1))
        ends = np.unique(rng.integers(1, valid + 2, rng.integers(1, 6))).tolist() if phase is Phase.PREFILL else None
        if ends is not None and rng.random() < 0.3:
            ends = [] if rng.random() < 0.5 else list(range(1, 301))
        if ends is not None:  # and one of them may go on in a later step
            ends = [each for each in zip([0, *ends], ends) if rng.random() < 0.9]
        for count, each in zip(counters, slots):
            count.begin_step(valid, phase)
            if valid:
                each.begin_step(ends, brings=brings)
        bringing = brings if valid else bringing
        if brings:
            brought += bring(served[0], None)
        for index, (E, pool) in enumerate(layers):
            weight = 1.0 / (1 + np.argsort(popular[index]) + (step // 40) * 3 % E)
            ids = np.stack([rng.choice(E, 4, replace=False, p=weight / weight.sum()) for _ in range(size)])
            ids[rng.random(ids.shape) < 0.1] = -1
            ids = ids.astype(rng.choice(["int32", "int64"]))
            if brings and pool is not None:
                for each in slots:
                    each.await_brought()
                same &= all(holds(mine, index) for mine in held)
                following = [other for other in served if other > index]
                if following:
                    brought += bring(following[0], index)
            had, taken = policy.slot_of.copy(), list(policy.taken)
            block, reads = int(rng.choice([16, 64])), int(rng.choice([0, 0, 5]))
            make = pool is not None and ids.size <= 64 and rng.random() < 0.5
            if make:
                order, blocks, counts = aligned(ids.ravel(), block)
            else:
                blocks = np.repeat(np.unique(ids), 1 + rng.integers(0, 2, len(np.unique(ids)))).astype("int32")
                counts = [len(blocks) * block]
            padded = np.array(counts, dtype="int32")
            blocks = np.concatenate([blocks, np.full(3, 1 << 30, dtype="int32")])  # not computed
            later = frozenset()
            if pool is not None and len(pools[pool][1]) > 1 and rng.random() < 0.5:
                later = frozenset([own(held[1], index)[-1].data_ptr()])
            slots[0].resolve(index, torch.from_numpy(ids), BlockLists(mine := torch.from_numpy(blocks.copy()),
                             torch.from_numpy(padded), block, reads))
            if make:
                there = [torch.full((n,), 1 << 30, dtype=torch.int32).cuda() for n in (ids.size * block, ids.size, 2)]
                slots[1].resolve(index, torch.from_numpy(ids).cuda(), BlockLists(there[1], there[2], block, reads, there[0]),
                                 later)
                found = [t.cpu().numpy() for t in there]
                same &= bool((found[0][: len(order)] == order).all() and (found[0][len(order) :] == 1 << 30).all())
                same &= found[2].tolist() == counts and bool((found[1][len(blocks) - 3 :] == 1 << 30).all())
                out = [mine.numpy(), np.concatenate([found[1][: len(blocks) - 3], blocks[-3:]])]
                made += 1
            else:
                there = torch.from_numpy(blocks.copy()).cuda()
                slots[1].resolve(index, torch.from_numpy(ids).cuda(),
                                 BlockLists(there, torch.from_numpy(padded).cuda(), block, reads), later)
                out = [mine.numpy(), there.cpu().numpy()]
            waited = slots[1].await_fills()
            same &= waited == bool(later and not bringing)
            late += waited
            same &= bool((out[0] == out[1]).all())
            remapped += int((out[0] != blocks).sum())
            for tensor, n in zip(held[0][pool], pools[pool][1]) if pool is not None else ():  # a slot holds its expert
                table = tensor.view(-1, n)[before[index] :]
                for b, e in zip(out[0].tolist(), blocks.tolist()):
                    same &= b == e or bool(torch.equal(table[b], table[e]))
            if pool is not None:
                new = int(((had < 0) & (policy.slot_of >= 0)).sum())
                same &= not (brings and new)
                lost = (had >= 0) & (policy.slot_of < 0)
                ran_out += taken[pool] < policy.taken[pool] and bool(lost.any())
                elsewhere += bool(np.delete(lost, index, axis=0).any())
                full += new == policy.max_fills
        for each in slots:
            each.await_brought()
        if step % 20 == 19:
            for cpu, gpu in zip(held[0], held[1]):
                same &= all(bool(torch.equal(a, b.cpu())) for a, b in zip(cpu, gpu))
    cpu, gpu = (count.read() for count in counters)
    for index, (E, pool) in enumerate(layers):
        if pool is None:
            same &= index not in slots[1]._states
            continue
        state = slots[1]._states[index]
        theirs = {name: getattr(state, name).cpu().numpy() for name in ("last", "lately", "long", "classes")}
        for name in ("last", "lately", "long"):
            same &= bool((getattr(policy, name)[index, :E] == theirs[name]).all())
        same &= bool((policy.classes[:, index, :E] + 1 == theirs["classes"]).all())
        same &= bool((policy.slot_of[index, :E] + 1 == state.pool.slot_of[state.at, :E].cpu().numpy()).all())
        worth = state.pool.worth[state.at].cpu().numpy()
        at = policy.pools[pool].layers.index(index)
        same &= bool((policy.worth[pool][at, :E] == worth[:E]).all()) and bool((worth[E:] == 255).all())
        same &= state.pool.taken.tolist() == [policy.taken[pool]]
    table = slots[1]._table.cpu().numpy().view("uint32")
    same &= table[0] == policy.now and bool((table[1:].reshape(3, -1)[:2] == [policy.events, policy.uses]).all())
    fills = [*cpu.slots[:, :, 2].sum(axis=(0, 2)).tolist(), int(cpu.slots[:, :, 3].sum()) - brought, brought]
    happened = [int(each) for each in (ran_out, elsewhere, full, short, moved, made, late)]
    print(json.dumps([bool(same), bool((cpu.slots == gpu.slots).all()), remapped, fills, happened]))
"""


SMALL = [(20, 0), (13, None), (17, 0), (24, 1), (24, 1), (20, 0)], [(28, [64, 48, 4, 70000]), (7, [33, 100])]
"""The experts and the pool of each layer; the slots of each pool, and the bytes of an expert in each of its tensors."""
ALONE = [(24, 0)], [(6, [16])]
MORE_THAN_THREADS = [(600, 0), (30, 1), *[(600, 0)] * 7], [(700, [16]), (0, [16])]
"""Experts, and in long steps ids and blocks of rows too; and reads of the pool, in which some threads have two."""


@pytest.mark.parametrize(
    ("model", "seed", "first_block", "steps"),
    [(SMALL, 0, 0, 150), (SMALL, 1, 0, 150), (SMALL, 2, 7, 150), (ALONE, 4, 0, 150), (MORE_THAN_THREADS, 9, 0, 120)],
)
def test_kernels_decide_and_copy_as_the_policy_does(standin, model, seed, first_block, steps):
    layers, pools = model
    program = SAME.replace("LAYERS", repr(layers)).replace("POOLS", repr(pools))
    program = program.replace("SEED", str(seed)).replace("STEPS", str(steps))
    same, counted, remapped, fills, happened = standin.run(program, first_block=first_block).said
    assert (same, counted) == (True, True)
    assert remapped > 500
    prefill, decode, uncounted, brought = fills
    assert decode > 100
    assert prefill > 0
    assert uncounted == 0
    assert brought > 100 or model is ALONE
    ran_out, elsewhere, full, short, moved, made, late = happened
    assert made > 50
    assert late > 50 or model is not SMALL
    assert ran_out > 0
    assert elsewhere > 10 or model is ALONE
    assert short > 10
    assert moved > 0 or model is not SMALL
    assert full > 10 or model is not MORE_THAN_THREADS


def test_the_kernel_fills_as_many_as_the_policy_at_most(standin):
    ran = standin.run("""
        from sglang_uvm_offload.cuda.ops import device_ops
        print(json.dumps(device_ops(0).max_fills))
    """)
    assert ran.said == MAX_FILLS


def test_a_pool_has_as_many_experts_as_a_block_looks_through_at_most(standin):
    ran = standin.run(
        """
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.cuda.slots import CudaSlots
        from sglang_uvm_offload.cuda.structs import CudaFailure
        from sglang_uvm_offload.memory.slots import MAX_EXPERTS, MAX_POOL_EXPERTS, BlockLists, Rows, SlotLayer
        from sglang_uvm_offload.routing.counts import Phase
        tensor = torch.zeros((MAX_EXPERTS + 1) * 16, dtype=torch.uint8, device="cuda")
        layer = SlotLayer([Rows(tensor.data_ptr(), 16)], MAX_EXPERTS, 0, MAX_EXPERTS)
        most, blocks = MAX_POOL_EXPERTS // MAX_EXPERTS, torch.zeros(1, dtype=torch.int32).cuda()
        padded = torch.full((1,), 16, dtype=torch.int32).cuda()
        def step(layer, expert):
            counters.begin_step(1, Phase.DECODE)
            slots.begin_step()
            blocks.copy_(torch.tensor([expert]))
            slots.resolve(layer, torch.tensor([[expert]]).cuda(), BlockLists(blocks, padded, 16))
            return blocks.item()
        for count in (most, most + 1):
            counters = CudaRoutingCounters(count, MAX_EXPERTS)
            slots = CudaSlots(counters, [layer] * count, [1])
            slots.set_share(np.full((count, MAX_EXPERTS), 16, dtype="uint8"))
            try:
                rows = [step(0, 7), step(0, -1), step(count - 1, MAX_EXPERTS - 1)]
                print(json.dumps([rows, [int(slots._states[i].pool.slot_of[i].cpu().sum()) for i in (0, count - 1)]]))
            except CudaFailure as refused:
                print(json.dumps(str(refused)))
        """
    )
    served, refused = map(json.loads, ran.out.splitlines())
    assert served == [[MAX_EXPERTS, -1, MAX_EXPERTS], [0, 1]], "the last layer's miss takes the slot of the first one's"
    assert "cudaErrorInvalidValue" in refused


def test_nothing_waits_for_the_device_between_steps(standin):
    """Not for what is resident now either: steps that were launched go on."""
    ran = standin.run(
        """
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.cuda.slots import CudaSlots
        from sglang_uvm_offload.memory.slots import Rows, SlotLayer
        tensor = torch.zeros(12 * 64, dtype=torch.uint8, device="cuda")
        from sglang_uvm_offload.routing.counts import Phase
        counters = CudaRoutingCounters(1, 8)
        slots = CudaSlots(counters, [SlotLayer([Rows(tensor.data_ptr(), 64)], 8, 0, 8)], [4])
        for offloaded in (16, 3):
            slots.set_share(np.full((1, 8), offloaded, dtype="uint8"))
            slots.reset()
            counters.begin_step(1, Phase.DECODE)
            slots.begin_step()
        print(json.dumps(slots._share.cpu().tolist()))
        """,
    )
    assert ran.said == [[3] * 8], ran.err
    begun, last = (i for i, call in enumerate(ran.calls) if call.get("kernel") == "uvm_begin_step_kernel")
    assert not [call for call in ran.calls[begun:last] if "Synchronize" in call["call"]]


def test_a_layer_starts_before_its_predecessor_has_ended_unless_that_writes_what_it_reads_first(standin):
    ran = standin.run(
        """
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.cuda.slots import CudaSlots
        from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
        from sglang_uvm_offload.routing.counts import Phase
        tensor = torch.zeros(12 * 64, dtype=torch.uint8, device="cuda")
        counters = CudaRoutingCounters(2, 8)
        slots = CudaSlots(counters, [SlotLayer([Rows(tensor.data_ptr(), 64)], 8, 0, 8)] * 2, [4])
        launched, launch = [], slots._ops.resolve_slots
        slots._ops.resolve_slots = lambda *args, programmatic: launched.append(programmatic) or launch(
            *args, programmatic=programmatic
        )
        ids, lists = torch.zeros(1, 1, dtype=torch.int32).cuda(), [torch.zeros(1, dtype=torch.int32).cuda() for _ in range(2)]
        for _ in range(2):
            counters.begin_step(1, Phase.DECODE)
            slots.begin_step()
            for layer in (0, 1, 1, 0, 1):
                slots.resolve(layer, ids, BlockLists(*lists, 16))
        print(json.dumps(launched))
        """
    )
    assert ran.said == [False, True, False, True, True] * 2


def test_blocks_fill_what_the_deciding_one_chose_whatever_the_control_words_say_by_then(standin):
    """Here the list that the deciding block writes lies where they are: -1 for the first two blocks of rows."""
    ran = standin.run("""
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.cuda.slots import CudaSlots
        from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
        from sglang_uvm_offload.routing.counts import Phase
        values = torch.from_numpy(np.random.default_rng(0).integers(1, 256, 100000, "uint8"))
        rows = torch.zeros(3, len(values), dtype=torch.uint8, device="cuda")
        rows[1].copy_(values)
        counters = CudaRoutingCounters(1, 2)
        slots = CudaSlots(counters, [SlotLayer([Rows(rows.data_ptr(), len(values))], 2, 0, 2)], [1])
        slots.set_share(np.full((1, 2), 16, dtype="uint8"))
        counters.begin_step(1, Phase.DECODE)
        slots.begin_step()
        blocks, (order, padded) = on_device(np.array([1, 0, 1, 0], "int32")), (torch.zeros(n).int().cuda() for n in (4, 1))
        slots._step = slots._step._replace(control=blocks.view(torch.int64))
        slots.resolve(0, on_device(np.array([[1, -1, -1]], "int32")), BlockLists(blocks, padded, 1, order=order))
        print(json.dumps([blocks.tolist(), bool(torch.equal(rows[2].cpu(), values))]))
    """)
    assert ran.said == [[-1, -1, 2, 0], True]


def test_a_step_begins_by_one_launch(standin):
    ran = standin.run(
        BRING
        + """
    counters.begin_step(1, Phase.DECODE)
    slots.begin_step()
    counters.begin_step(0, Phase.DECODE)
    print(json.dumps(slots._table[:1].tolist()))
    """
    )
    launches = [call["kernel"] for call in ran.calls if call.get("kernel", "").startswith("uvm_")]
    assert launches == ["uvm_begin_step_kernel"] * 3
    assert ran.said == [2], "what begins no step for slots ages none"


BRING = """
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.cuda.slots import CudaSlots
    from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
    from sglang_uvm_offload.routing.counts import Phase
    rows = torch.zeros(12, 64, dtype=torch.uint8, device="cuda")
    rows[:8].copy_(torch.arange(1, 9, dtype=torch.uint8).view(8, 1).expand(8, 64))
    counters = CudaRoutingCounters(1, 8)
    slots = CudaSlots(counters, [SlotLayer([Rows(rows.data_ptr(), 64)], 8, 0, 8)], [4])
    slots.set_share(np.full((1, 8), 16, dtype="uint8"))
    counters.begin_step(1, Phase.PREFILL)
    slots.begin_step([(0, 1)], brings=True)
    def bring():
        try:
            slots.bring(0, None)
        except ManagedMemoryError as failure:
            return [failure.call, str(failure)]
    def read():
        # the experts that are computed in place of experts 0 to 7, by their bytes
        blocks, padded = on_device(np.arange(8, dtype="int32")), on_device(np.array([128], dtype="int32"))
        slots.await_brought()
        slots.resolve(0, on_device(np.arange(8, dtype="int32").reshape(1, 8)), BlockLists(blocks, padded, 16))
        return [blocks.cpu().tolist(), rows.cpu()[blocks.cpu().long(), 0].tolist()]
"""
EXPERTS_OF_BRING = list(range(1, 9))


def test_experts_are_brought_to_slots(standin):
    ran = standin.run(BRING + "    print(json.dumps([bring(), *read()]))")
    assert ran.said == [None, [8, 9, 10, 11, 4, 5, 6, 7], EXPERTS_OF_BRING]


def test_nothing_is_brought_while_the_caller_captures_a_graph(standin):
    ran = standin.run(
        BRING
        + """
    before = slots.may_bring()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        during, refused = slots.may_bring(), bring()
    print(json.dumps([before, during, refused, *read()]))
    """
    )
    before, during, (_, message), *read = ran.said
    assert (before, during) == (True, False)
    assert "capturing a CUDA graph" in message
    assert read == [list(range(8)), EXPERTS_OF_BRING]
    assert not [call for call in ran.calls if call.get("graph") and call["call"] == "cudaLaunchKernel"]


@pytest.mark.parametrize("kernel", ["uvm_bring_slots", "uvm_fill_slots"])
def test_what_could_not_be_brought_is_in_no_slot(standin, kernel):
    program = BRING + "    print(json.dumps([bring(), *read()]))"
    launches = [call["kernel"] for call in standin.run(program).calls if call["call"] == "cudaLaunchKernel"]
    nth = launches.index(f"{kernel}_kernel") + 1
    (call, message), blocks, experts = standin.run(program, fail=f"cudaLaunchKernel:{nth}:2").said
    assert call == kernel
    assert "cudaErrorMemoryAllocation" in message
    assert "layer 0" in message
    assert blocks == list(range(8))
    assert experts == EXPERTS_OF_BRING

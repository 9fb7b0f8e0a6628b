"""The kernels of the slots, run on the CPU by the stand-in driver: they decide as ``policy/slot_policy`` does, to the last bit,
and copy each byte to its place."""

from __future__ import annotations

import pytest

from sglang_uvm_offload.policy.slot_policy import MAX_FILLS

SAME = """
    from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
    from sglang_uvm_offload.cpu.slots import CpuSlots
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.cuda.slots import CudaSlots
    from sglang_uvm_offload.memory.slots import Rows, SlotLayer
    from sglang_uvm_offload.routing.counts import Phase

    rng = np.random.default_rng(SEED)
    shapes = [(E, S, sizes) for E, S, sizes in SHAPES]
    width = max(E for E, _, _ in shapes)

    def rows(E, S, sizes, device):
        tensors = [torch.zeros((E + S) * n, dtype=torch.uint8, device=device) for n in sizes]
        for tensor, n in zip(tensors, sizes):
            values = torch.from_numpy(np.random.default_rng(n).integers(1, 256, E * n).astype("uint8"))
            tensor[: E * n].copy_(values)
        return tensors

    held = [[rows(*shape, device) for shape in shapes] for device in ("cpu", "cuda")]
    # What a layer may be computed from instead: copies of its experts elsewhere. Its last tensor is none of them.
    copies = [
        [[t[: E * n].clone() for t, n in zip(tensors, sizes)] for tensors, (E, _, sizes) in zip(mine, shapes)] for mine in held
    ]
    counters = [kind(len(shapes), width) for kind in (CpuRoutingCounters, CudaRoutingCounters)]
    slots = []
    for kind, mine, count in zip((CpuSlots, CudaSlots), held, counters):
        layers = [
            SlotLayer([Rows(t.data_ptr(), n) for t, n in zip(tensors, sizes)], E, S)
            for tensors, (E, S, sizes) in zip(mine, shapes)
        ]
        slots.append(kind(count, layers))

    def share():
        whole = rng.integers(0, 4, (len(shapes), width))
        return np.where(whole == 0, 0, np.where(whole == 1, rng.integers(1, 17, whole.shape), 16)).astype("uint8")

    popular = [rng.permutation(E) for E, _, _ in shapes]
    first = share()
    for each in slots:
        each.set_share(first)
    same, remapped, fills = True, 0, 0
    for step in range(STEPS):
        if step % 97 == 96:
            new = share()
            for each in slots:
                each.set_share(new)
        if step % 61 == 60:
            for each in slots:
                each.reset()
        phase = Phase.PREFILL if rng.random() < 0.15 else Phase.DECODE
        size = int(rng.integers(1, 300 if phase is Phase.PREFILL and rng.random() < 0.5 else 5))
        valid = 0 if rng.random() < 0.05 else int(rng.integers(1, size + 1))
        ends = np.unique(rng.integers(1, valid + 2, rng.integers(1, 6))).tolist() if phase is Phase.PREFILL else None
        if ends is not None and rng.random() < 0.3:
            ends = [] if rng.random() < 0.5 else list(range(1, 301))
        streams = phase is Phase.PREFILL and rng.random() < 0.5
        for count, each in zip(counters, slots):
            count.begin_step(valid, phase)
            if valid:
                each.begin_step(ends)
        for index, (E, S, _) in enumerate(shapes):
            weight = 1.0 / (1 + np.argsort(popular[index]) + (step // 40) * 3 % E)
            ids = np.stack([rng.choice(E, 4, replace=False, p=weight / weight.sum()) for _ in range(size)])
            ids[rng.random(ids.shape) < 0.1] = -1
            ids = ids.astype(rng.choice(["int32", "int64"]))
            if streams:
                for each, of, mine, move in zip(slots, copies, held, (lambda t: t, lambda t: t.cuda())):
                    elsewhere = list(zip(mine[index], of[index]))[:-1]
                    for own, copy in elsewhere:
                        own[: copy.numel()].copy_(torch.zeros_like(copy, device="cpu"))
                    addresses = [copy.data_ptr() for _, copy in elsewhere]
                    each.keep(index, move(torch.from_numpy(ids)), [*addresses, mine[index][-1].data_ptr()])
                    for own, copy in elsewhere:
                        own[: copy.numel()].copy_(copy)
                continue
            block = int(rng.choice([16, 64]))
            blocks = np.repeat(np.unique(ids), 1 + rng.integers(0, 2, len(np.unique(ids)))).astype("int32")
            padded = np.array([len(blocks) * block], dtype="int32")
            blocks = np.concatenate([blocks, np.full(3, 1 << 30, dtype="int32")])  # not computed
            out = []
            for each, move in zip(slots, (lambda t: t, lambda t: t.cuda())):
                mine = move(torch.from_numpy(blocks.copy()))
                each.resolve(index, move(torch.from_numpy(ids)), mine, move(torch.from_numpy(padded)), block)
                out.append(mine.cpu().numpy())
            same &= bool((out[0] == out[1]).all())
            remapped += int((out[0] != blocks).sum())
            for tensors, n in zip(held[0][index], shapes[index][2]):  # a slot holds its expert
                table = tensors.view(E + S, n)
                for b, e in zip(out[0].tolist(), blocks.tolist()):
                    same &= b == e or bool(torch.equal(table[b], table[e]))
        if step % 50 == 49:
            for cpu, gpu in zip(held[0], held[1]):
                same &= all(bool(torch.equal(a, b.cpu())) for a, b in zip(cpu, gpu))
    cpu, gpu = (count.read() for count in counters)
    policy, states = slots[0].policy, slots[1]._states
    for index, (E, S, _) in enumerate(shapes):
        names = ("last", "lately", "long", "slot_of", "owner", "classes")
        theirs = {name: getattr(states[index], name).cpu().numpy() for name in names}
        for name in ("last", "lately", "long"):
            same &= bool((getattr(policy, name)[index, :E] == theirs[name]).all())
        same &= bool((policy.slot_of[index, :E] + 1 == theirs["slot_of"]).all())
        same &= bool((policy.owner[index] + 1 == theirs["owner"]).all())
        same &= bool((policy.classes[:, index, :E] + 1 == theirs["classes"]).all())
    table = slots[1]._table.cpu().numpy().view("uint32")
    same &= table[0] == policy.now and bool((table[1:].reshape(3, -1)[:2] == [policy.events, policy.uses]).all())
    fills = [*cpu.slots[:, :, 2].sum(axis=(0, 2)).tolist(), *cpu.slots[:, :, 3].sum(axis=(0, 2)).tolist()]
    print(json.dumps([bool(same), bool((cpu.slots == gpu.slots).all()), remapped, fills]))
"""


SMALL = [(20, 6, [64, 48, 4, 70000]), (24, 6, [33, 100]), (7, 6, [16])]
MORE_THAN_THREADS = [(600, 70, [16])]
"""Experts, and in long steps ids and blocks of rows too."""


@pytest.mark.parametrize(
    ("shapes", "seed", "first_block"), [(SMALL, 0, 0), (SMALL, 1, 0), (SMALL, 2, 7), (MORE_THAN_THREADS, 3, 0)]
)
def test_kernels_decide_and_copy_as_the_policy_does(standin, shapes, seed, first_block):
    program = SAME.replace("SHAPES", repr(shapes)).replace("SEED", str(seed)).replace("STEPS", "250")
    same, counted, remapped, fills = standin.run(program, first_block=first_block).said
    assert (same, counted) == (True, True)
    assert remapped > 500
    prefill, decode, kept, never = fills
    assert decode > 100
    assert min(prefill, kept) > 10
    assert never == 0


def test_the_kernel_fills_as_many_as_the_policy_at_most(standin):
    """Fewer slots than that are in the other tests, which would not see a difference."""
    ran = standin.run("""
        from sglang_uvm_offload.cuda.ops import device_ops
        print(json.dumps(device_ops(0).max_fills))
    """)
    assert ran.said == MAX_FILLS


def test_nothing_waits_for_the_device_between_steps(standin):
    """Not for what is resident now either: steps that were launched go on."""
    ran = standin.run(
        """
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.cuda.slots import CudaSlots
        from sglang_uvm_offload.memory.slots import Rows, SlotLayer
        tensor = torch.zeros(12 * 64, dtype=torch.uint8, device="cuda")
        slots = CudaSlots(CudaRoutingCounters(1, 8), [SlotLayer([Rows(tensor.data_ptr(), 64)], 8, 4)])
        for offloaded in (16, 3):
            slots.set_share(np.full((1, 8), offloaded, dtype="uint8"))
            slots.reset()
            slots.begin_step()
        print(json.dumps(slots._share.cpu().tolist()))
        """,
    )
    assert ran.said == [[3] * 8], ran.err
    begun, last = (i for i, call in enumerate(ran.calls) if call.get("kernel") == "uvm_begin_slots_kernel")
    assert not [call for call in ran.calls[begun:last] if "Synchronize" in call["call"]]

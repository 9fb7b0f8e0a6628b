"""Parts that measure the kernels that fill slots: the cost of deciding, and the rates of misses and of whole layers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.environment import STAND_IN, computes, zeros_by_copies
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.timing import Beside, capture, elapsed_ms, gb_per_s
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.pool import ExpertPool
from sglang_uvm_offload.memory.protocol import ManagedRange
from sglang_uvm_offload.memory.slots import MAX_ALIGNED, NO_TENSORS, BlockLists, Guess, SlotLayer
from sglang_uvm_offload.memory.slots import Rows as TensorRows
from sglang_uvm_offload.memory.staging import LINK_BLOCKS, Part
from sglang_uvm_offload.policy.slot_policy import WHOLE
from sglang_uvm_offload.routing.counts import SLOT_BROUGHT, SLOT_FILLS, SLOT_HITS, Phase

KIB, MIB = 1 << 10, 1 << 20
BLOCK_M = 16

# ---- deciding ----


ALIGNED = ("SGLang", "SGLang, then slots", "slots")


class Resolved:
    """A captured step that resolves the slots of many layers. The pool is full: slots hold each layer's first experts."""

    EXPERTS, TOP_K, ROW_BYTES = 256, 8, 64

    def __init__(self, batch: int, num_slots: int, layers: int):
        self._batch, self._layers, self._num_slots = batch, layers, num_slots
        self._counters = CudaRoutingCounters(layers, self.EXPERTS)
        self._rows = torch.zeros((self.EXPERTS + layers * num_slots) * self.ROW_BYTES, dtype=torch.uint8, device="cuda")
        served = SlotLayer([TensorRows(self._rows.data_ptr(), self.ROW_BYTES)], self.EXPERTS, 0, self.EXPERTS)
        self._slots = CudaSlots(self._counters, [served] * layers, [layers * num_slots])
        self._slots.set_share(np.full((layers, self.EXPERTS), WHOLE, dtype=np.uint8))
        self._fill(num_slots)
        self._random = np.random.default_rng(batch)
        self._ids = torch.zeros(batch, self.TOP_K, dtype=torch.int32, device="cuda")
        self._owners = torch.full((layers, self.EXPERTS), -1, dtype=torch.int32, device="cuda")
        self._blocks = torch.zeros_like(self._owners)
        self._padded = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.use(num_slots)
        self._counters.begin_step(0, Phase.DECODE)
        self._graph = capture(self._forward)
        self._aligned = (
            {way: capture(partial(self._align, way)) for way in ALIGNED} if batch * self.TOP_K <= MAX_ALIGNED else {}
        )

    def _fill(self, num_slots: int) -> None:
        """Fills slots with each layer's first experts, in as many steps as the limit of fills per step requires."""
        ids = torch.arange(num_slots, dtype=torch.int32).view(-1, 8).cuda()
        nothing, none = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        for _ in range(0, num_slots, 64):
            self.begin_step(len(ids))
            for layer in range(self._layers):
                self._slots.resolve(layer, ids, BlockLists(nothing, none, BLOCK_M))

    def use(self, experts: int) -> int:
        """Makes the next steps choose at random among the first ``experts``. Returns how many of them they use."""
        ids = np.argsort(self._random.random((self._batch, experts)), axis=1)[:, : self.TOP_K].astype(np.int32)
        used = np.unique(ids).astype(np.int32)
        self._ids.copy_(torch.from_numpy(ids))
        self._owners[:, : used.size].copy_(torch.from_numpy(np.tile(used, (self._layers, 1))))
        self._padded.copy_(torch.tensor([used.size * BLOCK_M], dtype=torch.int32))
        return int(used.size)

    def begin_step(self, tokens: int) -> None:
        self._counters.begin_step(tokens, Phase.DECODE)
        self._slots.begin_step()

    def _forward(self) -> None:
        for layer in range(self._layers):
            self._slots.resolve(layer, self._ids, BlockLists(self._blocks[layer], self._padded, BLOCK_M))

    def _align(self, way: str) -> None:
        """Aligns the ids by a ``way`` of ``ALIGNED``: who makes the lists, and whether slots resolve them."""
        from sglang.srt.layers.moe.fused_moe_triton import moe_align_block_size  # only this part needs SGLang

        pairs = self._ids.numel()
        for layer in range(self._layers):
            if way == "slots":
                order, blocks, padded = (self._ids.new_empty(size) for size in (pairs * BLOCK_M, pairs, 1))
                self._slots.resolve(layer, self._ids, BlockLists(blocks, padded, BLOCK_M, order=order))
                continue
            _, blocks, padded = moe_align_block_size(self._ids, BLOCK_M, self.EXPERTS)
            if way == "SGLang, then slots":
                self._slots.resolve(layer, self._ids, BlockLists(blocks, padded, BLOCK_M))

    def replay_ms(self) -> float:
        self._blocks.copy_(self._owners)
        self.begin_step(self._batch)
        return elapsed_ms(self._graph.replay)

    def aligned_ms(self) -> dict[str, float]:
        """Returns milliseconds by ``ALIGNED``; empty with too many ids."""
        times = {}
        for way, graph in self._aligned.items():
            self.begin_step(self._batch)
            times[way] = elapsed_ms(graph.replay)
        return times

    def counted(self, kind: int) -> int:
        """Returns the total of one kind of ``routing.counts`` over all decode steps."""
        counted = self._counters.read().slots
        assert counted is not None
        return int(counted[:, Phase.DECODE, kind].sum())


def resolve(rows: Rows) -> None:
    """Times resolving 75 layers in one graph, with every expert in a slot and with misses in a full pool, and compares SGLang's
    aligner alone, followed by resolving, and replaced by it."""
    layers = rows.pick(75, 2)
    for num_slots in (64, 192):
        for batch in (1, 8, 64)[:: rows.pick(1, 2)]:
            if rows.late():
                return
            step = Resolved(batch, num_slots, layers)
            labels = {"slots": num_slots, "batch": batch, "layers": layers}
            resolve_hits(rows, step, labels)
            resolve_misses(rows, step, labels)


def resolve_hits(rows: Rows, step: Resolved, labels: dict[str, int]) -> None:
    before = step.counted(SLOT_FILLS)
    times = [step.replay_ms() for _ in range(rows.pick(32, 3))][2:]
    rows.put("resolve", "us a layer", [1e3 * ms / labels["layers"] for ms in times], **labels)
    begin = [elapsed_ms(partial(step.begin_step, labels["batch"])) for _ in range(rows.pick(20, 2))]
    rows.put("begin_step", "ms", begin, **labels)
    aligned = [step.aligned_ms() for _ in range(rows.pick(32, 3))][2:]
    for way in aligned[0]:
        rows.put("align", "us a layer", [1e3 * ms[way] / labels["layers"] for ms in aligned], way=way, **labels)
    if (fills := step.counted(SLOT_FILLS) - before) != 0:
        raise AssertionError(f"{fills} fills in steps whose experts were all in slots")


def resolve_misses(rows: Rows, step: Resolved, labels: dict[str, int]) -> None:
    """Times steps that use any of the experts and so look for victims in the pool of all layers. Rows are so small that copies
    take no time. Misses and fills are means per layer."""
    times, used, count = [], 0, rows.pick(32, 3)
    before = [step.counted(kind) for kind in (SLOT_HITS, SLOT_FILLS)]
    for _ in range(count):
        used += step.use(Resolved.EXPERTS)
        times.append(step.replay_ms())
    hits, fills = (step.counted(kind) - first for kind, first in zip((SLOT_HITS, SLOT_FILLS), before, strict=True))
    resolved = count * labels["layers"]
    means = {"misses": round(used / count - hits / resolved, 2), "fills": round(fills / resolved, 2)}
    rows.put("resolve_misses", "us a layer", [1e3 * ms / labels["layers"] for ms in times[2:]], **labels, **means)
    if computes() and not fills:
        raise AssertionError("no fills in steps that used any of the experts")


# ---- fills ----


class Filled:
    """One tensor of offloaded experts with slots for ``most`` of them, and steps that fill some."""

    def __init__(self, memory: CudaMemory, experts: int, expert_bytes: int, most: int):
        pool = ExpertPool(memory, 1, experts, [expert_bytes], most)
        home = pool.vacant_home(0, expert_bytes)
        assert home is not None
        if home.layout.placeable:
            home.place(np.zeros(home.layout.num_extents, dtype=bool))
        pool.place_slots(most)
        self.experts, self.first_slot, self.nbytes = experts, pool.first_slot(0), expert_bytes
        self.rows = pool.rows_from(home)
        for expert in range(experts):
            self.rows[expert].copy_(torch.from_numpy(np.random.default_rng(expert).integers(0, 256, expert_bytes, "uint8")))
        self.counters = CudaRoutingCounters(1, experts)
        served = SlotLayer([TensorRows(home.address, expert_bytes)], experts, 0, self.first_slot)
        self._slots = CudaSlots(self.counters, [served], [most])
        self._slots.set_share(np.full((1, experts), WHOLE, dtype=np.uint8))
        self.scratch = torch.zeros(most, expert_bytes, dtype=torch.uint8, device="cuda")
        self._staging = CudaStaging(0, most * expert_bytes, 1)

    def graph(self, count: int) -> Callable[[int], float]:
        """Returns a timer of a captured step that misses ``count`` experts from a given one on, in milliseconds."""
        self.ids = torch.zeros(1, count, dtype=torch.int32, device="cuda")
        self.blocks = torch.zeros(count, dtype=torch.int32, device="cuda")
        self.padded = torch.tensor([count * BLOCK_M], dtype=torch.int32).cuda()
        self.counters.begin_step(0, Phase.DECODE)
        graph = capture(lambda: self._slots.resolve(0, self.ids, BlockLists(self.blocks, self.padded, BLOCK_M)))

        def once(first: int) -> float:
            named = torch.arange(first, first + count, dtype=torch.int32)
            self.ids[0].copy_(named)
            self.blocks.copy_(named)
            self._slots.reset()
            self.counters.begin_step(1, Phase.DECODE)
            self._slots.begin_step()
            return elapsed_ms(graph.replay)

        return once

    def wrong(self, first: int) -> int:
        """Counts experts of the last step that have no slot, or whose slot holds other bytes."""
        slots = self.blocks.tolist()
        pairs = [(self.rows[row], self.rows[first + i]) for i, row in enumerate(slots)]
        if not computes():
            pairs = [(row.cpu(), expert.cpu()) for row, expert in pairs]
        return sum(row < self.first_slot or not torch.equal(*pair) for row, pair in zip(slots, pairs, strict=True))

    def bring(self, blocks: int) -> Callable[[], None]:
        """Returns a call that brings as many experts as fit into the empty slots, with ``blocks`` thread blocks."""
        self._slots.reset()
        self.counters.begin_step(1, Phase.PREFILL)
        self._slots.begin_step([(0, 1)], brings=True)
        self._slots.link_blocks = blocks

        def bring() -> None:
            self._slots.bring(0, None)
            self._slots.await_brought()

        return bring

    def brought_wrong(self) -> int:
        """Counts all experts, as ``wrong``."""
        self.blocks = torch.arange(self.experts, dtype=torch.int32).cuda()
        padded = torch.tensor([self.experts * BLOCK_M], dtype=torch.int32).cuda()
        self._slots.resolve(0, self.blocks.view(1, -1), BlockLists(self.blocks, padded, BLOCK_M))
        return self.wrong(0)

    def copied(self, count: int, first: int) -> None:
        """Copies experts with the stream buffers' kernel."""
        part = ManagedRange(self.rows[first].data_ptr(), count * self.nbytes, "experts")
        self._staging.begin_step()
        self._staging.copy(0, [Part(part, part.nbytes, 0)])
        self._staging.acquire(0)


def fill(rows: Rows) -> None:
    """Compares fills of a layer's misses with a copy of the same experts, checks the slots' bytes, measures the slots' read
    rate, which shows where they lie, and fills slots beside a kernel that occupies the whole GPU."""
    memory = CudaMemory()
    for kib in (64, 48) if rows.small else (1536, 3072, 6144, 11264, 16384):
        most = rows.pick(32, 8)
        filled = Filled(memory, most * 2, kib * KIB, most)
        wrong = done = 0
        for count in (1, 4) if rows.small else (1, 4, 8, 32):
            if rows.late():
                return
            firsts = [i * count % (filled.experts - count) for i in range(rows.pick(12, 3))]
            once, times = filled.graph(count), []
            for first in firsts:
                times.append(once(first))
                wrong += filled.wrong(first)
                done += count
            put_rate(rows, filled, count, "slots", times[2:])
            copies = [elapsed_ms(partial(filled.copied, count, first)) for first in firsts]
            put_rate(rows, filled, count, "copy kernel", copies[2:])
        rows.put("fill_wrong", "experts", [wrong], done=done, expert_mib=kib / KIB)
        if wrong:
            raise AssertionError(f"{wrong} of {done} filled slots hold other bytes than their experts")
        where_slots_lie(rows, filled, kib / KIB)
        del filled, once
        gc.collect()
        torch.cuda.empty_cache()
    beside(rows, memory)


def put_rate(rows: Rows, filled: Filled, count: int, way: str, times: list[float]) -> None:
    rates = [gb_per_s(count * filled.nbytes, ms) for ms in times]
    rows.put("fill", "GB/s", rates, way=way, fills=count, expert_mib=filled.nbytes / MIB)


def where_slots_lie(rows: Rows, filled: Filled, mib: float) -> None:
    """Compares reads of the rows behind the experts with reads of plain VRAM: equal rates show that they are in VRAM."""
    slots, out = filled.rows[filled.first_slot :].view(torch.int32), filled.scratch.view(torch.int32)
    plain = torch.zeros_like(out)
    for what, source in (("slots", slots), ("plain VRAM", plain)):
        times = [elapsed_ms(partial(torch.bitwise_xor, source, 1, out=out)) for _ in range(rows.pick(12, 3))][2:]
        rates = [gb_per_s(out.numel() * 4, ms) for ms in times]
        rows.put("slot_read", "GB/s", rates, what=what, expert_mib=mib)


def beside(rows: Rows, memory: CudaMemory) -> None:
    """Fills slots in many steps while another stream's kernels have more blocks than the GPU holds: no fill may hang."""
    filled = Filled(memory, 16, rows.pick(3072, 64) * KIB, 8)
    source = torch.zeros(rows.pick(256 * MIB, MIB) // 4, dtype=torch.int32, device="cuda")
    target, side = torch.zeros_like(source), torch.cuda.Stream()
    work = Beside(partial(torch.add, source, 1, out=target))
    once, times, wrong = filled.graph(4), [], 0
    work.last(20)
    for i in range(rows.pick(40, 2)):
        if rows.late():
            return
        with torch.cuda.stream(side):
            work.run()
        times.append(once(i % 8))
        wrong += filled.wrong(i % 8)
    torch.cuda.synchronize()
    rows.put("fill_beside", "ms", times, fills=4, expert_mib=filled.nbytes / MIB)
    rows.put("fill_wrong", "experts", [wrong], done=4 * len(times), expert_mib=filled.nbytes / MIB)
    if wrong:
        raise AssertionError(f"{wrong} slots hold other bytes, filled beside another kernel")


# ---- beside a GEMM ----


class Overlapped:
    """A layer of offloaded experts of 3 and 1.5 MiB. Two kernels replace its GEMMs; they are bound by VRAM and read as many
    bytes as a step's experts have."""

    EXPERTS, SIZES = 64, (3072, 1536)

    def __init__(self, memory: CudaMemory, most: int, small: bool):
        sizes = [(64 if small else kib) * KIB for kib in self.SIZES]
        pool = ExpertPool(memory, 1, self.EXPERTS, sizes, most)
        homes = []
        for nbytes in sizes:
            home = pool.vacant_home(0, nbytes)
            assert home is not None
            home.place(np.zeros(home.layout.num_extents, dtype=bool))
            homes.append(home)
        pool.place_slots(most)
        self._counters = CudaRoutingCounters(1, self.EXPERTS)
        tensors = [TensorRows(home.address, nbytes) for home, nbytes in zip(homes, sizes, strict=True)]
        self._slots = CudaSlots(self._counters, [SlotLayer(tensors, self.EXPERTS, 0, pool.first_slot(0))], [most])
        self._slots.set_share(np.full((1, self.EXPERTS), WHOLE, dtype=np.uint8))
        self.later = frozenset([homes[1].address])
        self._read = [torch.zeros(most * nbytes, dtype=torch.uint8, device="cuda") for nbytes in sizes]
        self._seen = [torch.zeros_like(each) for each in self._read]
        self._pool = pool  # keeps the tensors alive

    def graph(self, used: int, misses: int, later: frozenset[int]) -> Callable[[], float]:
        """Returns a timer of a captured step with ``used`` experts, ``misses`` of which miss, in milliseconds."""
        ids = torch.zeros(1, used, dtype=torch.int32, device="cuda")
        blocks, padded = torch.zeros(used, dtype=torch.int32, device="cuda"), torch.tensor([used * BLOCK_M]).int().cuda()
        self._captured = blocks, padded  # the graph does not keep them alive
        self._counters.begin_step(0, Phase.DECODE)

        def forward() -> None:
            self._slots.resolve(0, ids, BlockLists(blocks, padded, BLOCK_M), later)
            for which, (source, target) in enumerate(zip(self._read, self._seen, strict=True)):
                if which:
                    self._slots.await_fills()
                torch.add(source, 1, out=target)

        graph = capture(forward)

        def once() -> float:
            self._slots.reset()
            for first in (misses, 0):  # the first step fills what the second one hits
                ids[0].copy_(first + torch.arange(used, dtype=torch.int32) % (used - first))
                self._counters.begin_step(1, Phase.DECODE)
                self._slots.begin_step()
                ms = elapsed_ms(graph.replay)
            return ms

        return once


def overlap(rows: Rows) -> None:
    """Times steps with misses whose tensors for the second GEMM reach slots before the first GEMM, or while it runs."""
    most = rows.pick(8, 4)
    layer = Overlapped(CudaMemory(), most, rows.small)
    for misses in (0, 1, 4)[: rows.pick(3, 2)]:
        for way, later in (("before", NO_TENSORS), ("beside", layer.later)):
            if rows.late():
                return
            once = layer.graph(most, misses, later)
            rows.put("overlap", "ms", [once() for _ in range(rows.pick(24, 3))][2:], way=way, misses=misses)


# ---- ahead of routing ----


class Ahead:
    """A step of layers with offloaded experts of 3 and 1.5 MiB. Kernels replace the rest of each layer: two read the rows of
    its experts in list order, and one takes as long as attention may."""

    EXPERTS, USED, SLOTS, SIZES = 16, 4, 72, (3072, 1536)

    def __init__(self, memory: CudaMemory, small: bool):
        self.layers = 3 if small else 6
        sizes = [(64 if small else kib) * KIB for kib in self.SIZES]
        self._pool = pool = ExpertPool(memory, self.layers, self.EXPERTS, sizes, self.SLOTS)
        self._counters = CudaRoutingCounters(self.layers, self.EXPERTS)
        self._rows, served = list[list[torch.Tensor]](), list[SlotLayer]()
        for layer in range(self.layers):
            homes = [pool.vacant_home(layer, nbytes) for nbytes in sizes]
            for home in homes:
                assert home is not None
                home.place(np.zeros(home.layout.num_extents, dtype=bool))
            tensors = [TensorRows(home.address, nbytes) for home, nbytes in zip(homes, sizes, strict=True) if home is not None]
            served.append(SlotLayer(tensors, self.EXPERTS, 0, pool.first_slot(layer)))
            self._rows.append([pool.rows_from(home) for home in homes if home is not None])
        pool.place_slots(self.SLOTS)
        for layer, tensors_of in enumerate(self._rows):
            for expert in range(self.EXPERTS):
                for rows in tensors_of:
                    rows[expert].copy_(torch.full((rows.shape[1],), self._value(layer, expert), dtype=torch.uint8))
        self.slots = CudaSlots(self._counters, served, [self.SLOTS], ahead=True)
        self.slots.set_share(np.full((self.layers, self.EXPERTS), WHOLE, dtype=np.uint8))
        self._later = [frozenset([layer.rows[1].address]) for layer in served]
        self._source = torch.zeros((1 if small else 96) * MIB, dtype=torch.uint8, device="cuda")
        self._target = torch.zeros_like(self._source)
        self._seen = [[torch.zeros_like(rows[: self.USED]) for rows in each] for each in self._rows]

    @classmethod
    def _value(cls, layer: int, expert: int) -> int:
        return 1 + layer * cls.EXPERTS + expert

    def graph(self, misses: int, guessed: int | None) -> Callable[[], float]:
        """Returns a timer of a captured step in which each layer misses ``misses`` experts, the last ones that it uses, in
        milliseconds. ``guessed`` is the first of as many guessed experts for each layer; None: no lookahead."""
        self._ids = torch.zeros(1, self.USED, dtype=torch.int32, device="cuda")
        blocks = torch.zeros(self.layers, self.USED, dtype=torch.int32, device="cuda")
        padded = torch.tensor([self.USED * BLOCK_M], dtype=torch.int32).cuda()
        guess = torch.arange(guessed or 0, (guessed or 0) + misses, dtype=torch.int32).view(1, misses).cuda()
        self._captured = blocks, padded, guess  # the graph does not keep them alive
        self._counters.begin_step(0, Phase.DECODE)

        def forward() -> None:
            for layer, (rows, seen) in enumerate(zip(self._rows, self._seen, strict=True)):
                blocks[layer].copy_(self._ids[0])
                self.slots.resolve(layer, self._ids, BlockLists(blocks[layer], padded, BLOCK_M), self._later[layer])
                if guessed is not None and layer + 1 < self.layers:
                    self.slots.look_ahead(layer + 1, Guess(lambda: guess, lambda logits: logits, 0))
                torch.index_select(rows[0], 0, blocks[layer], out=seen[0])
                self.slots.await_fills()
                torch.index_select(rows[1], 0, blocks[layer], out=seen[1])
                self.slots.end_layer(layer)
                torch.add(self._source, 1, out=self._target)

        graph = capture(forward)

        def once() -> float:
            self.slots.reset()
            for first in (0, misses):  # the first step fills what the second one hits
                self._first = first
                self._ids[0].copy_(torch.arange(first, first + self.USED, dtype=torch.int32))
                self._counters.begin_step(1, Phase.DECODE)
                self.slots.begin_step()
                ms = elapsed_ms(graph.replay)
            return ms

        return once

    def wrong(self) -> int:
        """Counts rows that the last step read with other bytes than their experts'."""
        if not computes():
            return 0
        pairs = [(layer, rows, i) for layer, seen in enumerate(self._seen) for rows in seen for i in range(self.USED)]
        return sum(bool((rows[i] != self._value(layer, self._first + i)).any()) for layer, rows, i in pairs)


def ahead(rows: Rows) -> None:
    """Times steps with misses without guesses, with right ones and with wrong ones, and checks the bytes that they read."""
    step = Ahead(CudaMemory(), rows.small)
    wrong = done = 0
    for misses in (1, 2)[: rows.pick(2, 1)]:
        for way, guessed in (("none", None), ("right", Ahead.USED), ("wrong", 2 * Ahead.USED)):
            if rows.late():
                return
            once, times, before = step.graph(misses, guessed), [], step.slots.gain()
            for _ in range(rows.pick(24, 3)):
                times.append(once())
                wrong, done = wrong + step.wrong(), done + 2 * step.layers * Ahead.USED
            after = step.slots.gain()
            assert before is not None
            assert after is not None
            new = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
            rows.put(
                "ahead", "ms", times[2:], way=way, misses=misses, **{f"ahead_{name}": count for name, count in new.items()}
            )
    rows.put("ahead_wrong", "rows", [wrong], done=done)
    if wrong:
        raise AssertionError(f"{wrong} of {done} rows had other bytes than their experts")


# ---- whole layers ----


def bring(rows: Rows) -> None:
    """Brings a layer's experts into slots with different numbers of thread blocks, alone and beside a kernel that is bound by
    VRAM. Measures the rate and how much longer the other kernel takes, and compares the stream buffers' copy kernel."""
    memory = CudaMemory()
    source = torch.zeros(rows.pick(256 * MIB, MIB) // 4, dtype=torch.int32, device="cuda")
    target, side = torch.zeros_like(source), torch.cuda.Stream()
    work = Beside(partial(torch.add, source, 1, out=target))
    for kib, experts in ((64, 8),) if rows.small else ((1536, 128), (6144, 32)):
        filled = Filled(memory, experts, kib * KIB, experts)
        labels, wrong, done = {"expert_mib": kib / KIB}, 0, 0
        copies = [elapsed_ms(partial(filled.copied, experts, 0)) for _ in range(rows.pick(8, 3))][2:]
        rows.put(
            "bring", "GB/s", brought_rates(filled, copies), way="copy kernel", blocks=LINK_BLOCKS, beside="nothing", **labels
        )
        for blocks in (LINK_BLOCKS,) if rows.small else (8, LINK_BLOCKS, 32, 64):
            if rows.late():
                return
            alone, crowded, alongside = [], [], []
            for _ in range(rows.pick(8, 3)):
                alone.append(elapsed_ms(filled.bring(blocks)))
                wrong, done = wrong + filled.brought_wrong(), done + experts
            work.last(alone[-1])
            usual = [elapsed_ms(work.run) for _ in range(rows.pick(4, 2))]
            for _ in range(rows.pick(8, 3)):
                run, both = filled.bring(blocks), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                torch.cuda.synchronize()
                with torch.cuda.stream(side):
                    both[0].record()
                    work.run()
                    both[1].record()
                crowded.append(elapsed_ms(run))
                side.synchronize()
                alongside.append(both[0].elapsed_time(both[1]))
                wrong, done = wrong + filled.brought_wrong(), done + experts
            way = {"way": "slots", "blocks": blocks, **labels}
            rows.put("bring", "GB/s", brought_rates(filled, alone[2:]), beside="nothing", **way)
            rows.put("bring", "GB/s", brought_rates(filled, crowded[2:]), beside="memory-bound", **way)
            rows.put("bring_cost", "x", [ms / max(np.median(usual), 1e-3) for ms in alongside[2:]], **way)
        rows.put("bring_wrong", "experts", [wrong], done=done, **labels)
        counted = filled.counters.read().slots
        assert counted is not None
        if wrong or counted[0, Phase.PREFILL, SLOT_BROUGHT].sum() != done:
            raise AssertionError(f"{wrong} of {done} slots hold other bytes than their experts, or not all were brought")
        del filled, run
        gc.collect()
        torch.cuda.empty_cache()


def brought_rates(filled: Filled, times: list[float]) -> list[float]:
    return [gb_per_s(filled.experts * filled.nbytes, ms) for ms in times]


PARTS = {each.__name__: each for each in (resolve, fill, overlap, ahead, bring)}

if __name__ == "__main__":
    if STAND_IN:
        zeros_by_copies()
    run_part(PARTS)

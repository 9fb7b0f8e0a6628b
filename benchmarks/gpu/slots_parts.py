"""Parts about slots: what resolving costs, how fast experts come, and decode steps in the VRAM of as many residents."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.gpu import routing_trace
from benchmarks.gpu.decode_step import capture, elapsed_ms
from benchmarks.gpu.environment import STAND_IN, computes, zeros_by_copies
from benchmarks.gpu.moe import Weights, random_weights
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.shapes import DEEPSEEK_V3, MoeShape
from benchmarks.gpu.slot_layers import ResolvedStep, SlotDecode, SlotModel, Streamed, used
from benchmarks.gpu.stream_layers import Beside
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import ManagedRange
from sglang_uvm_offload.memory.slots import Rows as TensorRows
from sglang_uvm_offload.memory.slots import SlotLayer
from sglang_uvm_offload.memory.staging import Part
from sglang_uvm_offload.policy.slots import WHOLE
from sglang_uvm_offload.routing.counts import Phase

KIB, MIB = 1 << 10, 1 << 20
BLOCK_M = 16

# ---- nothing to fill ----


def empty(rows: Rows) -> None:
    """75 layers in one graph, all of whose experts are in slots: the time that resolving adds to a resident step of MoE
    layers. A real step has attention too, so the share is larger here than there."""
    shape = DEEPSEEK_V3.toy if rows.small else DEEPSEEK_V3
    layers = rows.pick(75, 2)
    weights = [random_weights(shape, True, "cuda", seed) for seed in range(shape.layers)]
    for num_slots in (64, 192):
        for batch in (1, 8, 64)[:: rows.pick(1, 2)]:
            if rows.late():
                return
            step = ResolvedStep(shape, weights, batch, num_slots, layers)
            before = step.fills()
            times = step.times(rows.pick(30, 1))
            labels = {"slots": num_slots, "batch": batch, "layers": layers}
            for graph, found in times.items():
                rows.put("resolved_step", "ms", found, graph=graph, **labels)
            pairs = list(zip(times["with"], times["without"], strict=True))
            rows.put("resolve", "us a layer", [1e3 * ms / layers for ms in times["alone"]], how="alone", **labels)
            added = [1e3 * (more - less) / layers for more, less in pairs]
            rows.put("resolve", "us a layer", added, how="beside the MoE", **labels)
            rows.put("resolve_share", "of the step", [more / less - 1 for more, less in pairs], **labels)
            begin = [elapsed_ms(partial(step.begin_step, batch)) for _ in range(rows.pick(20, 2))]
            rows.put("begin_slots", "ms", begin, **labels)
            if step.fills() != before:
                raise AssertionError(f"{step.fills() - before} fills in steps whose experts were all in slots")


# ---- fills ----


class Filled:
    """One tensor of offloaded experts and a slot for each, and the work of a step that misses some of them."""

    def __init__(self, memory: CudaMemory, experts: int, expert_bytes: int, most: int):
        layout = ExpertLayout(experts, expert_bytes, memory.block_bytes, most)
        self.experts, self.nbytes = experts, expert_bytes
        self._tensor = ExpertTensor(memory, "experts", layout)
        self._tensor.place(np.zeros(layout.num_extents, dtype=bool))
        self.rows = memory.tensor(self._tensor.managed)[: layout.range_bytes].view(experts + most, expert_bytes)
        for expert in range(experts):
            self.rows[expert].copy_(torch.from_numpy(np.random.default_rng(expert).integers(0, 256, expert_bytes, "uint8")))
        self.counters = CudaRoutingCounters(1, experts)
        served = SlotLayer([TensorRows(self._tensor.address, expert_bytes)], experts, most)
        self._slots = CudaSlots(self.counters, [served])
        self._slots.set_share(np.full((1, experts), WHOLE, dtype=np.uint8))
        self.scratch = torch.zeros(most, expert_bytes, dtype=torch.uint8, device="cuda")
        self._staging = CudaStaging(0, most * expert_bytes, 1)

    def graph(self, count: int) -> Callable[[int], float]:
        """Milliseconds of a captured step that misses ``count`` experts from the given one on."""
        self.ids = torch.zeros(1, count, dtype=torch.int32, device="cuda")
        self.blocks = torch.zeros(count, dtype=torch.int32, device="cuda")
        self.padded = torch.tensor([count * BLOCK_M], dtype=torch.int32).cuda()
        self.counters.begin_step(0, Phase.DECODE)
        graph = capture(lambda: self._slots.resolve(0, self.ids, self.blocks, self.padded, BLOCK_M))

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
        """Of the experts of the last step, those whose slot holds other bytes, or that have none."""
        slots = self.blocks.tolist()
        if not computes():
            pairs = [(self.rows[row].cpu(), self.rows[first + i].cpu()) for i, row in enumerate(slots)]
        else:
            pairs = [(self.rows[row], self.rows[first + i]) for i, row in enumerate(slots)]
        return sum(row < self.experts or not torch.equal(*pair) for row, pair in zip(slots, pairs, strict=True))

    def copied(self, count: int, first: int) -> None:
        """By the project's kernel for streaming."""
        part = ManagedRange(self.rows[first].data_ptr(), count * self.nbytes, "experts")
        self._staging.begin_step()
        self._staging.copy(0, [Part(part, part.nbytes, 0)])
        self._staging.acquire(0)

    def engine(self, count: int, first: int) -> None:
        """``cudaMemcpyAsync``, told device to device, an expert a call."""
        for i in range(count):
            self.scratch[i].copy_(self.rows[first + i], non_blocking=True)

    def read(self, count: int, first: int) -> None:
        """By one kernel of torch."""
        source = self.rows[first : first + count].view(torch.int32)
        torch.bitwise_xor(source, 1, out=self.scratch[:count].view(torch.int32))


def fill(rows: Rows) -> None:
    """A layer's misses brought into slots, beside other ways to bring the same experts; bytes of the slots; the slots' own
    read rate, which shows where they lie; and fills beside a kernel that leaves no room on the GPU."""
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
            for way, work in (
                ("copy kernel", filled.copied),
                ("copy engine, device to device", filled.engine),
                ("a kernel of torch", filled.read),
            ):
                put_rate(rows, filled, count, way, [elapsed_ms(partial(work, count, first)) for first in firsts][2:])
        rows.put("fill_wrong", "experts", [wrong], done=done, expert_mib=kib / KIB)
        if wrong:
            raise AssertionError(f"{wrong} of {done} filled slots hold other bytes than their experts")
        where_slots_lie(rows, filled, kib / KIB)
        del filled, once
        gc.collect()
        torch.cuda.empty_cache()
    beside(rows, memory)


def put_rate(rows: Rows, filled: Filled, count: int, way: str, times: list[float]) -> None:
    rates = [count * filled.nbytes / ms / 1e6 if ms > 0 else 0.0 for ms in times]
    rows.put("fill", "GB/s", rates, way=way, fills=count, expert_mib=filled.nbytes / MIB)
    rows.put("fill_time", "ms", times, way=way, fills=count, expert_mib=filled.nbytes / MIB)


def where_slots_lie(rows: Rows, filled: Filled, mib: float) -> None:
    """The rows behind the experts are in VRAM if they are read like VRAM."""
    slots, out = filled.rows[filled.experts :].view(torch.int32), filled.scratch.view(torch.int32)
    plain = torch.zeros_like(out)
    for what, source in (("slots", slots), ("plain VRAM", plain)):
        times = [elapsed_ms(partial(torch.bitwise_xor, source, 1, out=out)) for _ in range(rows.pick(12, 3))][2:]
        rates = [out.numel() * 4 / ms / 1e6 if ms > 0 else 0.0 for ms in times]
        rows.put("slot_read", "GB/s", rates, what=what, expert_mib=mib)


def beside(rows: Rows, memory: CudaMemory) -> None:
    """The fills of many steps while another stream's kernels have more blocks than the GPU holds: none may wait for ever."""
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


# ---- decode steps ----

SPLITS = {"residents only": 0.0, "slots only": 1.0, "half and half": 0.5}
"""Of the rows in VRAM, the share that is slots."""


def layer(rows: Rows) -> None:
    """Decode steps with a quarter or half of the experts' bytes in VRAM, as residents, as slots, or both. At each replay the
    output is that of a layer wholly in plain VRAM, and hits and fills are the policy's. Half-way a prompt streams: its copies
    take experts from slots, and leave others in slots."""
    shape = DEEPSEEK_V3.toy if rows.small else DEEPSEEK_V3
    trace = routing_trace.for_shape(shape)
    for fp8, share in ((False, 0.25), (True, 0.25), (False, 0.5))[: rows.pick(3, 2)]:
        plain = [weights_of(shape, fp8, seed) for seed in range(shape.layers)]
        for split in SPLITS:
            if rows.late():
                return
            one_split(rows, shape, trace, plain, share, split)
            gc.collect()
            torch.cuda.empty_cache()
        del plain
        gc.collect()
        torch.cuda.empty_cache()


def weights_of(shape: MoeShape, fp8: bool, seed: int) -> Weights:
    """No two rows have the same bytes, also where no kernel draws any."""
    made = random_weights(shape, fp8, "cuda", seed)
    if not computes():
        random = np.random.default_rng(seed)
        for weight in (made.w13, made.w2):
            flat = weight.view(torch.uint8).flatten()
            flat.copy_(torch.from_numpy(random.integers(0, 256, flat.numel(), "uint8")))
    return made


def one_split(rows: Rows, shape: MoeShape, trace: np.ndarray, plain: list[Weights], share: float, split: str) -> None:
    half, in_vram = trace.shape[0] // 2, round(share * shape.experts)
    num_slots = round(SPLITS[split] * in_vram)
    model = SlotModel(CudaMemory(), plain, residents(trace[:half], plain[0], in_vram - num_slots), num_slots)
    labels = {"split": split, "share": share, "weights": "fp8" if plain[0].fp8 else "bf16"}
    rows.put("slot_vram", "GB", [model.vram_bytes / 1e9], **labels)
    for batch in (1, 4, 16, 64)[:: rows.pick(1, 3)]:
        if rows.late():
            return
        first, then = (requests(part, batch)[:: rows.pick(1, 24)] for part in (trace[:half], trace[half:]))
        model.begin_step(first[0, :0])  # nothing is decided while graphs are captured
        arms = [SlotDecode(shape, batch, weights, model.find) for weights in (plain, model.weights)]
        differ, times, streamed, use = 0, [], Streamed(), {"resident": 0, "hits": 0, "fills": 0, "activations": 0}
        for i, ids in enumerate([*(first if num_slots else first[-2:]), then[-1], *then]):
            if i == len(first):
                streamed = model.prefill(then[:, 0], plain)  # ends as the step that comes now
            counts = int(model.hits.sum()), int(model.fills.sum())
            model.begin_step(ids)
            for arm in arms:
                arm.route(ids)
            ms = [arm.replay_ms() for arm in arms][1]
            differ += not all(map(torch.equal, *(arm.result() for arm in arms)))
            times.append(ms)
            activated = used(ids, shape.experts)
            use["activations"] += int(activated.sum())
            use["resident"] += int((activated & (model.offloaded == 0)).sum())
            use["hits"] += int(model.hits.sum()) - counts[0]
            use["fills"] += int(model.fills.sum()) - counts[1]
        cell = labels | {"batch": batch, "kernels": arms[1].kernels}
        rows.put("slot_step", "ms", times[-len(then) :], **cell)
        for figure in ("resident", "hits", "fills"):
            rows.put("slot_use", "of the activations", [use[figure] / use["activations"]], figure=figure, **cell)
        bypasses = use["activations"] - use["resident"] - use["hits"] - use["fills"]
        rows.put("slot_use", "of the activations", [bypasses / use["activations"]], figure="read in place", **cell)
        rows.put("slot_bits", "replays that differ", [differ], done=len(times), **cell)
        rows.put("slot_stream", "experts with other bytes", [streamed.wrong], **streamed.compared, **cell)
        wrong = model.wrong_counts()
        decided = {name: int(getattr(model, name).sum()) for name in ("hits", "fills", "kept")}
        rows.put("slot_counts", "counts that differ", [wrong], **decided, **cell)
        if differ or wrong or streamed.wrong:
            raise AssertionError(
                f"{cell}: {differ} of {len(times)} replays differ, {wrong} counts of hits and fills, "
                f"and {streamed.wrong} experts in stream buffers"
            )


def residents(ids: np.ndarray, weights: Weights, count: int) -> np.ndarray:
    """``bool[layers, experts]``: as many of the most used as fit, with all their blocks, the VRAM of ``count`` rows."""
    num_experts = weights.w13.shape[0]
    sizes = [weight[0].numel() * weight.element_size() for weight in (weights.w13, weights.w2)]
    layouts = [layout for nbytes in sizes if (layout := ExpertLayout(num_experts, nbytes)).placeable]
    room = count * sum(layout.expert_bytes for layout in layouts)
    for fewer in range(count, 0, -1):
        chosen = routing_trace.hottest(ids, num_experts, fewer / num_experts)
        if max(sum(layout.taken_by(layout.holding(keep)) for layout in layouts) for keep in chosen) <= room:
            return chosen
    return np.zeros((ids.shape[2], num_experts), dtype=bool)


def requests(steps: np.ndarray, batch: int) -> np.ndarray:
    """``steps[step, request, layer, k]`` of so many requests: where there are fewer, later steps stand for others."""
    if batch <= steps.shape[1]:
        return steps[:, :batch]
    half = len(steps) // 2
    return np.concatenate([steps[:half], steps[half : 2 * half]], axis=1)[:, :batch]


PARTS = {each.__name__: each for each in (empty, fill, layer)}

if __name__ == "__main__":
    if STAND_IN:
        zeros_by_copies()
    run_part(PARTS)

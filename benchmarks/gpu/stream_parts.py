"""Parts that copy whole layers into stream buffers: whether the bytes are right, how fast they come, what a step gains."""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.decode_step import elapsed_ms
from benchmarks.gpu.environment import computes
from benchmarks.gpu.moe import Weights, random_weights
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.shapes import DEEPSEEK_V3, GLM_45_AIR, MoeShape
from benchmarks.gpu.stream_layers import Beside, Layer, Parts, Stack, copy_ms, uniform_step
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, Span
from sglang_uvm_offload.memory.staging import VRAM_BLOCKS, Part
from sglang_uvm_offload.sizing.streaming import break_even_tokens
from sglang_uvm_offload.streaming.replicas import Replicas, buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer

KIB, MIB = 1 << 10, 1 << 20
ODD_SIZES = (16, 17, 15, 128 * KIB, 128 * KIB + 5, 128 * KIB - 16, MIB + 48, 5 * BLOCK_BYTES + 7, 8 * BLOCK_BYTES - 16)
SHARES = (0.0, 0.5, 0.78, 0.9, 0.95)
OTHER_VRAM_BLOCKS, BLOCKS_AT = (48, 192), (0.78, 0.95)
"""Blocks of the copy for what is in VRAM, tried beside those that ship, and where."""
STEP_SHARES = (0.5, 0.78)


def same(a: torch.Tensor, b: torch.Tensor, small: bool) -> bool:
    """Their bytes, compared on the device where a kernel can."""
    a, b = a.view(torch.uint8), b.view(torch.uint8)
    return torch.equal(a.cpu(), b.cpu()) if small else torch.equal(a, b)


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


# ---- whether the bytes are right ----


def copies(rows: Rows) -> None:
    """Bytes that copies bring, of odd sizes, of ranges partly in VRAM, and of blocks that move; and what layers read that
    stream. Bytes of an earlier copy never count: the buffer is overwritten before each."""
    memory = CudaMemory()
    odd_sizes(rows, memory)
    gc.collect()
    while_blocks_move(rows, memory)
    gc.collect()
    for buffers in (1, 2):
        own_bytes(rows, memory, buffers)
        gc.collect()


def put_wrong(rows: Rows, what: str, wrong: int, done: int, **labels: float) -> None:
    rows.put("copies_wrong", "that differ", [wrong], what=what, done=done, **labels)
    if wrong:
        raise AssertionError(f"{wrong} of {done} differ: {what}")


def copied(staging: CudaStaging, parts: Parts, before: torch.Tensor, in_vram: Sequence[np.ndarray]) -> torch.Tensor:
    """The buffer after a copy over the bytes of ``before``."""
    staging.buffers[0].copy_(before)
    staging.begin_step()
    staging.copy(0, parts, None, in_vram)
    staging.acquire(0)
    return staging.buffers[0]


def odd_sizes(rows: Rows, memory: CudaMemory) -> None:
    """Every second block of a range is in VRAM. What lies between the ranges in the buffer stays as it was."""
    parts, held, in_vram, offset = [], [], [], 0
    for index, nbytes in enumerate(ODD_SIZES):
        managed = memory.allocate(nbytes, f"{nbytes} bytes")
        blocks = [Span(at, min(BLOCK_BYTES, nbytes - at)) for at in range(0, nbytes, BLOCK_BYTES)]
        memory.place(managed, blocks[index % 2 :: 2], Location.HOST)
        memory.place(managed, blocks[1 - index % 2 :: 2], Location.DEVICE)
        in_vram.append(np.arange(len(blocks)) % 2 == 1 - index % 2)
        held.append(memory.tensor(managed))
        held[-1].copy_(random_bytes(nbytes, index))
        parts.append(Part(managed, nbytes, offset))
        offset += -(-nbytes // 16) * 16 + 16
    staging = CudaStaging(0, offset, 1)
    wrong, rounds = 0, rows.pick(50, 2)
    for done in range(rounds):
        before = random_bytes(offset, 100 + done).cuda()
        expected = before.clone()
        for part, bytes_ in zip(parts, held, strict=True):
            expected[part.offset : part.offset + part.nbytes].copy_(bytes_)
        wrong += not same(copied(staging, parts, before, in_vram), expected, rows.small)
    put_wrong(rows, "copies of odd sizes, every second block in VRAM", wrong, rounds)


def while_blocks_move(rows: Rows, memory: CudaMemory) -> None:
    """Another thread promotes and demotes blocks of the range all the time."""
    layout = ExpertLayout(rows.pick(60, 8), rows.pick(17 * MIB + 4096, 3 * MIB + 4096))
    tensor = ExpertTensor(memory, "experts", layout)
    tensor.place(np.arange(layout.num_extents) % 2 == 0)
    held = tensor.bytes()
    held.copy_(random_bytes(layout.nbytes, 1))
    expected, before = held.clone(), random_bytes(layout.nbytes, 2).cuda()
    staging, whole = CudaStaging(0, layout.nbytes, 1), Part(tensor.managed, layout.nbytes, 0)
    stop, moved = threading.Event(), [0]

    def keep_moving() -> None:
        random = np.random.default_rng(3)
        while not stop.is_set():
            after = random.random(layout.num_extents) < random.random()
            moved[0] += tensor.demote(after) + tensor.promote(after)

    wrong = done = unmoved = 0
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(keep_moving)
        try:
            while done < rows.pick(300, 6) and not moving.done() and not rows.late():
                before_copy = moved[0]
                wrong += not same(copied(staging, [whole], before, [layout.block_mask(tensor.resident)]), expected, rows.small)
                unmoved += moved[0] == before_copy
                done += 1
        finally:
            stop.set()
    moving.result()
    if not moved[0]:
        raise AssertionError("no block moved beside the copies")
    put_wrong(rows, "copies while blocks of the range move", wrong, done, moved_gb=moved[0] / 1e9, without_a_move=unmoved)


KEY = 0x5A5A5A5A


def read(source: torch.Tensor, out: torch.Tensor) -> None:
    """By a kernel, where there are any."""
    if computes():
        torch.bitwise_xor(source.view(torch.int32), KEY, out=out.view(torch.int32))
    else:
        out.copy_(source)


def own_bytes(rows: Rows, memory: CudaMemory, buffers: int) -> None:
    """Steps through a few layers, whose weights and residents change between the steps."""
    experts, layers = rows.pick(32, 8), 4
    shape = MoeShape("", 1, experts, 1, 1024, rows.pick(512, 256))

    def bases(seed: int) -> Weights:
        w13, w2 = (
            random_bytes(experts * size, seed + extra).cuda().view(torch.bfloat16).view(experts, rows_, -1)
            for extra, size, rows_ in (
                (0, 4 * shape.hidden * shape.intermediate, 2 * shape.intermediate),
                (50, 2 * shape.hidden * shape.intermediate, shape.hidden),
            )
        )
        return Weights(w13, w2, w13[:0], w2[:0])

    versions = [bases(seed) for seed in range(layers + 1)]
    expected = [[torch.empty_like(each) for each in (it.w13, it.w2)] for it in versions]
    for version, outs in zip(versions, expected, strict=True):
        for weight, out in zip((version.w13, version.w2), outs, strict=True):
            read(weight, out)
    held = [Layer(memory, index, versions[index]) for index in range(layers)]
    largest = max(buffer_bytes(layer.experts) for layer in held)
    streamer = Streamer([layer.experts for layer in held], CudaStaging(0, largest, buffers), 1, lambda row, nbytes: None)
    seen = [[torch.empty_like(each) for each in outs] for outs in expected[:layers]]
    random, wrong, done, streamed = np.random.default_rng(buffers), 0, 0, 0
    for number in range(rows.pick(60, 3)):
        if rows.late():
            break
        for index, layer in enumerate(held):
            layer.keep(random.random(experts) < random.random())
            layer.write(versions[(index + number) % len(versions)])
        streamer.begin_step()
        for row, layer in enumerate(held):
            reading = streamer.enter(row)
            for _ in range(random.integers(1, 8)):  # shorter or longer than the copy beside it
                read(layer.module.get_parameter("w13").data, seen[row][0])
                read(layer.module.get_parameter("w2").data, seen[row][1])
            if reading is not None:
                streamer.leave(reading)
                streamed += 1
        streamer.end_step()
        for index, outs in enumerate(seen):
            wanted = expected[(index + number) % len(versions)]
            wrong += not all(same(*pair, rows.small) for pair in zip(outs, wanted, strict=True))
            done += 1
    if streamer.fault or not streamed:
        raise AssertionError(f"{streamed} of {done} layers streamed: {streamer.fault}")
    put_wrong(rows, f"layers that stream, buffers: {buffers}", wrong, done, streamed=streamed)


# ---- how fast they come ----


def rates(rows: Rows) -> None:
    """One layer through the project's own copies, idle and beside other work, by the share that is resident."""
    for full in (GLM_45_AIR, DEEPSEEK_V3):
        if rows.late():
            return
        copies_of_a_layer(rows, full.toy if rows.small else full, full.name)
        gc.collect()
        torch.cuda.empty_cache()


def copies_of_a_layer(rows: Rows, shape: MoeShape, name: str) -> None:
    plain = random_weights(shape, False, "cuda", 1)
    memory = CudaMemory()
    layer = Layer(memory, 0, plain)
    staging, side = CudaStaging(0, buffer_bytes(layer.experts), 1), torch.cuda.Stream()
    replicas = Replicas(layer.experts, staging.buffers)
    source, target = (torch.zeros(rows.pick(256 * MIB, MIB), dtype=torch.int32, device="cuda") for _ in range(2))
    others = {"nothing": None, "a memory-bound kernel": Beside(partial(torch.add, source, 1, out=target))}
    for tokens in (2048, 8192):
        others[f"the MoE at {tokens} tokens"] = Beside(partial(uniform_step(shape, tokens).run, plain))
    short = memory.allocate(BLOCK_BYTES, "a chunk")
    memory.place(short, [Span(0, BLOCK_BYTES)], Location.HOST)
    for what, beside in others.items():
        labels: dict[str, Any] = {"shape": name, "beside": what}
        if beside:
            beside.last(10)
        one = [Part(short, BLOCK_BYTES, 0)]
        found = [copy_ms(partial(staging.copy, 0, one), staging, side, beside)[0] for _ in range(rows.pick(12, 2))][1:]
        rows.put("short_copy", "ms", found, **labels)
    for share in SHARES:
        layer.keep_share(share)
        held = layer.experts
        copy = partial(staging.copy, 0, replicas.parts, None, held.blocks_in_vram)
        idle = statistics.median(copy_ms(copy, staging, side)[0] for _ in range(2))
        for what, beside in others.items():
            if beside:
                beside.last(1.5 * idle)
            alone = statistics.median(elapsed_ms(beside.run) for _ in range(3)) if beside else 0.0
            tried = OTHER_VRAM_BLOCKS if share in BLOCKS_AT and what.startswith("the MoE") else ()
            for blocks in (VRAM_BLOCKS, *tried):
                if rows.late():
                    return
                labels = {"shape": name, "resident": share, "beside": what, "vram_blocks": blocks}
                staging.vram_blocks = blocks
                times = [copy_ms(copy, staging, side, beside) for _ in range(rows.pick(6, 2))][1:]
                rows.put("layer_copy", "GB/s", [held.offloaded_bytes / ms / 1e6 for ms, _ in times], **labels)
                rows.put("layer_copy_vram", "GB/s", [held.resident_bytes / ms / 1e6 for ms, _ in times], **labels)
                if beside:
                    rows.put("layer_copy_slows", "of the copy's time", [(took - alone) / ms for ms, took in times], **labels)
        staging.vram_blocks = VRAM_BLOCKS
        if not same_layer(staging, replicas, plain, rows.small):
            raise AssertionError(f"the copy at {share:.0%} resident brought other bytes")


def same_layer(staging: CudaStaging, replicas: Replicas, plain: Weights, small: bool) -> bool:
    wanted = [weight.view(torch.uint8).flatten() for weight in (plain.w13, plain.w2)]
    buffer = staging.buffers[0]
    return all(
        same(buffer[part.offset : part.offset + part.nbytes], bytes_, small)
        for part, bytes_ in zip(replicas.parts, wanted, strict=True)
    )


# ---- what a step gains ----


def steps(rows: Rows) -> None:
    """Steps of MoE layers with everything in VRAM, streamed, and read in place. Few layers take turns, so that the first copy,
    which nothing hides, weighs as little as in a model."""
    shape = GLM_45_AIR.toy if rows.small else GLM_45_AIR
    memory = CudaMemory()
    layers = [Layer(memory, i, random_weights(shape, False, "cuda", i)) for i in range(rows.pick(4, 2))]
    in_turn = [layers[i % len(layers)] for i in range(rows.pick(20, 4))]
    nbytes = max(buffer_bytes(layer.experts) for layer in layers)
    streamers = {
        buffers: Streamer([layer.experts for layer in in_turn], CudaStaging(0, nbytes, buffers), 1, lambda row, nbytes: None)
        for buffers in (2, 1)
    }
    break_even = break_even_tokens(shape.experts, shape.top_k)
    for share in STEP_SHARES:
        for layer in layers:
            layer.keep_share(share)
        offloaded = [layer.experts.offloaded_bytes / 1e9 for layer in layers]
        rows.put("offloaded", "GB a layer", [statistics.mean(offloaded)], resident=share, shape=GLM_45_AIR.name)
        for tokens in (break_even, 512, 2048, 8192, *(() if rows.small else (32768,))):
            if rows.late():
                return
            one_size(rows, shape, tokens, layers, in_turn, streamers, resident=share, threshold=break_even)
            torch.cuda.empty_cache()


def one_size(
    rows: Rows,
    shape: MoeShape,
    tokens: int,
    layers: Sequence[Layer],
    in_turn: Sequence[Layer],
    streamers: dict[int, Streamer],
    **labels: float,
) -> None:
    """Every arm at one number of tokens. Each computes the same bits."""
    labels |= {"tokens": tokens}
    stack = Stack(uniform_step(shape, tokens), in_turn)
    expected = [stack.step.run(layer.plain).clone() for layer in layers]
    repeats = rows.pick(3, 1)

    def check(arm: str, row: int) -> None:
        if computes() and not torch.equal(stack.step.out, expected[row % len(layers)]):
            raise AssertionError(f"{arm}, layer {row}, {labels}: other bits than from plain memory")

    def put(arm: str, times: Sequence[float], count: int) -> None:
        rows.put("step", "ms a layer", [ms / count for ms in times], arm=arm, **labels)

    put("resident", [elapsed_ms(stack.resident) for _ in range(repeats + 1)][1:], len(in_turn))
    for buffers, streamer in streamers.items():
        arm = f"streamed, {buffers} buffer{'s' * (buffers > 1)}"
        stack.streamed(streamer, partial(check, arm))
        stack.held.clear()
        put(arm, [elapsed_ms(partial(stack.streamed, streamer)) for _ in range(repeats)], len(in_turn))
        held = [1e3 * seconds / len(in_turn) for seconds in stack.held]
        rows.put("host_time", "ms a layer", held, buffers=buffers, **labels)
    few = Stack(stack.step, layers)  # read many times over: seconds a layer
    times = [elapsed_ms(few.in_place) for _ in range(min(2, repeats))]
    check("in place", len(layers) - 1)
    put("in place", times, len(layers))


PARTS = {each.__name__: each for each in (copies, rates, steps)}

if __name__ == "__main__":
    run_part(PARTS)

"""Parts that run a MoE layer under graph replay: its experts in plain memory, managed, or partly offloaded."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.gpu import routing_trace
from benchmarks.gpu.decode_step import COUNTED, UNCOUNTED, CountedStep, Decode, Managed, elapsed_ms
from benchmarks.gpu.environment import computes
from benchmarks.gpu.moe import MoeStep, Tiles, align, random_weights, reference
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.shapes import DEEPSEEK_V3, GLM_45_AIR, SHAPES, MoeShape
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.routing.counts import Phase

BATCHES = (1, 8, 32)
RESIDENCY = (1.0, 0.78, 0.5)


def decode(rows: Rows, shape: MoeShape) -> None:
    """A decode step of the shape's layers: plain memory, then one managed copy at several residencies, one graph each."""
    name = shape.name
    shape = shape.toy if rows.small else shape
    trace = routing_trace.for_shape(shape)
    half = trace.shape[0] // 2
    profile, measured = trace[:half], trace[half : half + rows.pick(24, 2)]
    tiles = Tiles()
    for fp8 in (False, True):
        memory = CudaMemory()
        plain = [random_weights(shape, fp8, "cuda", seed) for seed in range(shape.layers)]
        managed = [Managed(memory, layer, f"layer {i}") for i, layer in enumerate(plain)]
        resident = {share: routing_trace.hottest(profile, shape.experts, share) for share in RESIDENCY}
        for batch in BATCHES[:: rows.pick(1, 2)]:
            ids = measured[:, :batch]
            arms = {
                "plain": Decode(shape, plain, ids, tiles),
                "managed": Decode(shape, [layer.weights for layer in managed], ids, tiles),
            }
            labels = {"shape": name, "weights": "fp8" if fp8 else "bf16", "batch": batch, "layers": shape.layers}
            arms["plain"].route(0)
            arms["plain"].graph.replay()
            expected = arms["plain"].out.cpu()
            # Plain and managed in turns, so that a clock that drifts does not favour one of them.
            turns: dict[str, list[float]] = {"plain": [], "managed": []}
            for _ in range(rows.pick(3, 1)):
                for arm, times in turns.items():
                    times += arms[arm].times(1, rows, replays=4)
            rows.put("decode", "ms", turns["plain"], arm="plain", resident=1.0, **labels)
            rows.put("decode", "ms", turns["managed"], arm="managed", resident=1.0, **labels)
            over_managed = arms["managed"]
            for share in RESIDENCY:
                if rows.late():
                    return
                for experts, keep in zip(managed, resident[share], strict=True):
                    experts.keep(keep)
                over_managed.route(0)
                over_managed.graph.replay()
                same = torch.equal(over_managed.out.cpu(), expected)
                rows.put("decode_bits", "bool", [same], arm="managed", resident=share, **labels)
                if computes() and not same:
                    raise AssertionError(f"{labels}: output at {share:.0%} resident differs from plain memory's")
                if share < 1:
                    rows.put("decode", "ms", over_managed.times(2, rows), arm="managed", resident=share, **labels)
                    away = activated_bytes(ids, np.stack([layer.offloaded_bytes for layer in managed]))
                    rows.put("decode_zero_copy", "MB a step", away / 1e6, resident=share, **labels)
            for experts in managed:
                experts.keep(np.ones(shape.experts, dtype=bool))
        del plain, managed, arms, experts, over_managed
        gc.collect()
        torch.cuda.empty_cache()


def activated_bytes(ids: np.ndarray, offloaded: np.ndarray) -> np.ndarray:
    """Bytes that each step reads of experts with ``offloaded`` (``[layers, experts]``) bytes in host RAM, each expert once."""
    activated = np.zeros((ids.shape[0], *offloaded.shape), dtype=bool)
    for step, layer in np.ndindex(ids.shape[0], ids.shape[2]):
        activated[step, layer, ids[step, :, layer].ravel()] = True
    return (activated * offloaded).sum(axis=(1, 2))


def check(rows: Rows) -> None:
    """The Triton MoE against torch in float32."""
    works = computes()
    for shape in (GLM_45_AIR, DEEPSEEK_V3):
        small = MoeShape(shape.name, 1, 16, 4, rows.pick(1024, 256), rows.pick(512, 128))
        for fp8, tokens in itertools.product((False, True), (3,) if rows.small else (1, 17, 300)):
            layer = random_weights(small, fp8, "cuda", 1)
            random = np.random.default_rng(tokens)
            ids = np.argsort(random.random((tokens, small.experts)), axis=1)[:, : small.top_k].astype(np.int32)
            step = MoeStep(small, tokens, small.top_k, Tiles(), "cuda")
            slots, experts = align(ids, small.experts, Tiles().m)
            step.route(torch.from_numpy(slots), torch.from_numpy(experts))
            step.x.normal_()
            step.out.fill_(float("nan"))
            out = step.run(layer).float()
            labels = {"weights": "fp8" if fp8 else "bf16", "tokens": tokens, "hidden": small.hidden}
            if not works:
                rows.put("moe_error", "relative", [], **labels)
                continue
            expected = reference(small, layer, step.x, torch.from_numpy(ids).cuda()).float()
            error = float((out - expected).norm() / expected.norm())
            rows.put("moe_error", "relative", [error], **labels)
            if not error < 1e-2:  # not a number fails too
                raise AssertionError(f"the Triton MoE is off by {error:.2g} ({labels})")


def counters(rows: Rows) -> None:
    """75 MoE layers in one graph, with and without the routing counters, and counted layer by layer. A real step has attention
    too, so the shares here are larger than there."""
    shape = GLM_45_AIR.toy if rows.small else GLM_45_AIR
    layers = rows.pick(75, 5)
    weights = [random_weights(shape, True, "cuda", seed) for seed in range(shape.layers)]
    trace = routing_trace.for_shape(shape)
    for batch in BATCHES[:: rows.pick(1, 2)]:
        if rows.late():
            return
        step = CountedStep(shape, weights, trace[:: rows.pick(4, 48), :batch], layers)
        times = step.times(rows.pick(3, 1))
        labels = {"batch": batch, "layers": layers}
        for name, found in times.items():
            rows.put("counted_step", "ms", found, counters=name, **labels)
        for way in (way for way in times if way != UNCOUNTED):
            shares = [with_ / without - 1 for with_, without in zip(times[way], times[UNCOUNTED], strict=True)]
            name = "counters_share" if way == COUNTED else "other_counters_share"
            rows.put(name, "of the step", shares, counters=way, **labels)
        begin = [elapsed_ms(partial(step.counted.begin_step, batch, Phase.DECODE)) for _ in range(20)]
        rows.put("begin_step", "ms", begin, **labels)


PARTS: dict[str, Callable[[Rows], None]] = {"check": check, "counters": counters}
PARTS |= {shape.name: partial(decode, shape=shape) for shape in SHAPES.values()}

if __name__ == "__main__":
    run_part(PARTS)

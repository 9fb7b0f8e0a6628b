"""Parts that run the SGLang MoE runners that the plugin hooks: steps from managed memory and from slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.gpu import marlin_build
from benchmarks.gpu.environment import STAND_IN, zeros_by_copies
from benchmarks.gpu.moe_deep_gemm import CONTIGUOUS, LAYOUTS, MaskedDeepGemm, SglangDeepGemm
from benchmarks.gpu.moe_function import MoeFunction, MoeShape, Replayed, ServedLayer, Tensors, function_here
from benchmarks.gpu.moe_marlin import SglangMarlin
from benchmarks.gpu.moe_triton import SglangTriton, SglangTritonFp8
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.timing import capture, elapsed_ms
from sglang_uvm_offload.cuda.memory import CudaMemory

FUNCTION = MoeShape(experts=32, top_k=4, hidden=2048, intermediate=1024)
UNUSED, COPIED, RESIDENT = np.arange(1), np.arange(10, 22), np.arange(24, 32)
"""Experts of ``FUNCTION``: one in host RAM that no token chooses, those in host RAM that slots hold, and those in VRAM. Tokens
choose only from the last two sets, so no slot is refilled. The sets are apart, so that they share no block of memory."""
BATCHES = (1, 4, 16, 64)


def compiled(rows: Rows) -> None:
    """Compiles Marlin's kernels, for this section and for servers with GPTQ experts."""
    for variant, seconds in ({} if rows.small else marlin_build.build()).items():
        rows.put("compiled", "s until it was there", [seconds], kernels=str(variant))


def triton(rows: Rows) -> None:
    """Triton with bf16 and block-FP8 experts."""
    one_function(rows, "Triton, bf16", SglangTriton)
    one_function(rows, "Triton, FP8", SglangTritonFp8)


def marlin(rows: Rows) -> None:
    """Marlin with MXFP4 experts."""
    one_function(rows, "Marlin", SglangMarlin)


def one_function(rows: Rows, name: str, real: type[MoeFunction]) -> None:
    function, shape = function_here(real), shape_for(rows)
    plain = function.weights(shape)
    served = ServedLayer(CudaMemory(), plain, holding(shape, RESIDENT), len(COPIED))
    in_place(rows, name, function, shape, plain, {"in place": served})
    through_slots(rows, name, function, shape, plain, served)


def deep_gemm(rows: Rows) -> None:
    """DeepGEMM with block-FP8 experts in both of its layouts; only the contiguous one computes from slots. There padding may
    read expert 0, so in-place steps are timed with that expert in VRAM too."""
    functions = dict(zip(LAYOUTS, map(function_here, (SglangDeepGemm, MaskedDeepGemm)), strict=True))
    shape = shape_for(rows)
    plain = functions[CONTIGUOUS].weights(shape)
    memory = CudaMemory()
    first = ServedLayer(memory, plain, holding(shape, UNUSED, RESIDENT), 0)
    served = ServedLayer(memory, plain, holding(shape, RESIDENT), len(COPIED))
    for layout, function in functions.items():
        in_place(rows, f"DeepGEMM, {layout}", function, shape, plain, {"in place": served, "in place, expert 0 in VRAM": first})
    through_slots(rows, f"DeepGEMM, {CONTIGUOUS}", functions[CONTIGUOUS], shape, plain, served)


def shape_for(rows: Rows) -> MoeShape:
    return replace(FUNCTION, hidden=512, intermediate=512) if rows.small else FUNCTION


def holding(shape: MoeShape, *experts: np.ndarray) -> np.ndarray:
    """Returns ``bool[experts]``, true for ``experts``."""
    return np.isin(np.arange(shape.experts), np.concatenate(experts))


def in_place(
    rows: Rows, name: str, function: type[MoeFunction], shape: MoeShape, plain: Tensors, layers: dict[str, ServedLayer]
) -> None:
    """Compares graphs over plain VRAM and over each layer without slots: their outputs, and times with every chosen expert in
    host RAM."""
    for batch in BATCHES[:: rows.pick(1, 3)]:
        if rows.late():
            return
        arms = {"plain": Replayed(function(shape, batch, nowhere), plain, capture)}
        for where, layer in layers.items():
            arms[where] = Replayed(function(shape, batch, nowhere), layer.weights, capture)
        for where in layers:
            cell = {"function": name, "where": where, "batch": batch, "kernels": function.kernels}
            compare(rows, cell, arms["plain"], arms[where])
        ids = chosen(COPIED, shape, batch, 0)
        missed = {where: layer.missed_bytes(ids) / 1e9 for where, layer in layers.items()}
        put_times(rows, arms, ids, {"function": name, "batch": batch}, missed)


def through_slots(
    rows: Rows, name: str, function: type[MoeFunction], shape: MoeShape, plain: Tensors, served: ServedLayer
) -> None:
    """Compares graphs over plain VRAM and over slots that the function's own steps filled and whose experts' rows are then
    overwritten: outputs, counts, and times with every chosen expert in slots."""
    fill_and_poison(function, shape, served)
    for batch in BATCHES[:: rows.pick(1, 3)]:
        if rows.late():
            return
        served.begin_step(0)  # capture resolves nothing
        arms = {"plain": Replayed(function(shape, batch, nowhere), plain, capture)}
        arms["slots"] = Replayed(function(shape, batch, served.find), served.weights, capture)
        before = served.counts()
        cell = {"function": name, "where": "slots", "batch": batch, "kernels": function.kernels}
        steps = compare(rows, cell, arms["plain"], arms["slots"], served)
        wanted = sum(np.isin(np.arange(shape.experts), np.intersect1d(ids, COPIED)).astype(np.int64) for ids in steps)
        hits, fills = (after - earlier for after, earlier in zip(served.counts(), before, strict=True))
        wrong = int((hits != wanted).sum() + fills.sum())
        rows.put("function_counts", "counts that differ", [wrong], hits=int(hits.sum()), done=len(steps), **cell)
        if wrong:
            raise AssertionError(f"{cell}: {wrong} counts of hits and fills differ")
        put_times(rows, arms, chosen(COPIED, shape, batch, 0), {"function": name, "batch": batch}, {}, served)


def nowhere(address: int) -> None:
    """Finds no slots for any layer."""


def compare(
    rows: Rows, cell: dict[str, object], plain: Replayed, found: Replayed, served: ServedLayer | None = None
) -> list[np.ndarray]:
    """Replays both with the same experts and returns these. Raises ``AssertionError`` if an output differs."""
    differ = varies = 0
    used = np.concatenate([RESIDENT, COPIED])
    batch = int(str(cell["batch"]))
    steps = [chosen(used, FUNCTION, batch, seed) for seed in range(1, rows.pick(50, 3) + 1)]
    for ids in steps:
        if served:
            served.begin_step(batch)
        expected, again, out = plain.outputs(ids), plain.outputs(ids), found.outputs(ids)
        differ, varies = differ + (not torch.equal(out, expected)), varies + (not torch.equal(again, expected))
    rows.put("function_bits", "replays that differ", [differ], done=len(steps), **cell)
    rows.put("function_varies", "replays over plain VRAM that differ", [varies], done=len(steps), **cell)
    if differ:
        raise AssertionError(f"{cell}: {differ} replays differ ({varies} over plain VRAM)")
    return steps


def put_times(
    rows: Rows,
    arms: dict[str, Replayed],
    ids: np.ndarray,
    labels: dict[str, object],
    missed_gb: dict[str, float],
    served: ServedLayer | None = None,
) -> None:
    """Times replays of each arm in turn, in milliseconds, without the first two rounds."""
    times: dict[str, list[float]] = {where: [] for where in arms}
    for repeat in range(rows.pick(20, 1) + 2):
        for where in sorted(arms, reverse=bool(repeat % 2)):
            if served:
                served.begin_step(len(ids))
            ms = elapsed_ms(arms[where].replaying(ids))
            if repeat > 1:
                times[where].append(ms)
    for where, found in times.items():
        rows.put("function_step", "ms", found, where=where, missed_gb=missed_gb.get(where, 0), **labels)


def fill_and_poison(function: type[MoeFunction], shape: MoeShape, served: ServedLayer) -> None:
    """Fills the slots by steps, then overwrites the rows of their experts and of the unused one. Raises ``AssertionError`` if
    the slots are not filled or in-place steps do not notice."""
    ids = COPIED.astype(np.int32).reshape(-1, shape.top_k)
    step, in_place = function(shape, len(ids), served.find), function(shape, len(ids), nowhere)
    step.route(ids)
    in_place.route(ids)
    served.begin_step(len(ids))
    step.run(served.weights)
    in_place.run(served.weights)
    expected = in_place.result(served.weights)
    if (filled := int(served.counts()[1].sum())) != len(COPIED):
        raise AssertionError(f"{filled} of {len(COPIED)} experts were filled into as many slots")
    served.poison(np.concatenate([UNUSED, COPIED]))
    in_place.run(served.weights)
    if torch.equal(in_place.result(served.weights), expected):
        raise AssertionError("a step that reads in place does not notice that its experts were overwritten")


def chosen(experts: Sequence[int] | np.ndarray, shape: MoeShape, batch: int, seed: int) -> np.ndarray:
    """Returns ``ids[tokens, k]`` drawn from ``experts``, different ones for each token."""
    random = np.random.default_rng([seed, batch])
    return np.stack([random.permutation(experts)[: shape.top_k] for _ in range(batch)]).astype(np.int32)


PARTS = {each.__name__: each for each in (compiled, triton, marlin, deep_gemm)}

if __name__ == "__main__":
    if STAND_IN:
        zeros_by_copies()
    run_part(PARTS)

"""Decode steps of a few MoE layers, captured once and replayed over measured routing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.moe import MoeStep, Tiles, Weights, align
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.shapes import MoeShape
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.routing.counts import IdFormat, Phase


class Managed:
    """A layer's experts in managed memory: the same bytes as ``plain``, any of them resident."""

    def __init__(self, memory: CudaMemory, plain: Weights, name: str):
        self.tensors = []
        views = []
        for what, weight in (("w13", plain.w13), ("w2", plain.w2)):
            expert_bytes = weight[0].numel() * weight.element_size()
            tensor = ExpertTensor(memory, f"{what} of {name}", ExpertLayout(weight.shape[0], expert_bytes))
            flat = tensor.bytes()
            tensor.place(np.ones(tensor.layout.num_extents, dtype=bool))
            flat.copy_(weight.view(torch.uint8).flatten())
            views.append(flat.view(weight.dtype).view(weight.shape))
            self.tensors.append(tensor)
        self.weights = Weights(views[0], views[1], plain.scale13, plain.scale2)

    @property
    def offloaded_bytes(self) -> np.ndarray:
        """``int64[E]``: the bytes of each expert in host RAM."""
        return np.sum([tensor.offloaded_bytes for tensor in self.tensors], axis=0)

    def keep(self, after: np.ndarray) -> None:
        """Make these experts (``bool[E]``) resident, and nothing beyond their blocks."""
        for tensor in self.tensors:
            tensor.demote(tensor.layout.holding(after))
        for tensor in self.tensors:
            tensor.promote(tensor.layout.holding(after))


def elapsed_ms(work: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


class Decode:
    """One captured decode step of a few MoE layers, replayed over measured routing. The layers share buffers but for their
    routing, so each layer's output is the next one's input."""

    def __init__(self, shape: MoeShape, layers: Sequence[Weights], ids: np.ndarray, tiles: Tiles):
        self.steps_ids = ids
        tokens = ids.shape[1]
        self.layers = [MoeStep(shape, tokens, shape.top_k, tiles, "cuda") for _ in layers]
        aligned = [[align(step[:, i], shape.experts, tiles.m) for i in range(len(layers))] for step in ids]
        self._slots = [torch.from_numpy(np.stack([step[i][0] for step in aligned])).cuda() for i in range(len(layers))]
        self._experts = [torch.from_numpy(np.stack([step[i][1] for step in aligned])).cuda() for i in range(len(layers))]
        random = torch.Generator("cuda").manual_seed(tokens)
        self.layers[0].x.normal_(generator=random)
        self.route(0)

        def step() -> None:
            x = None
            for buffers, weights in zip(self.layers, layers, strict=True):
                x = buffers.run(weights, x)

        self.graph = capture(step)

    @property
    def out(self) -> torch.Tensor:
        return self.layers[-1].out

    def route(self, step: int) -> None:
        for buffers, slots, experts in zip(self.layers, self._slots, self._experts, strict=True):
            buffers.route(slots[step], experts[step])

    def times(self, passes: int, rows: Rows, replays: int = 1) -> list[float]:
        """Milliseconds of a replay, routing after routing. Several ``replays`` in a row hide the time of their launches; the
        weights of one step are more than the L2 cache holds."""
        found = []
        for repeat, step in itertools.product(range(passes + 1), range(len(self.steps_ids))):
            if repeat > 1 and rows.late():
                break
            self.route(step)
            ms = elapsed_ms(partial(self._replay, replays)) / replays
            if repeat:  # the first pass warms up
                found.append(ms)
        return found

    def _replay(self, times: int) -> None:
        for _ in range(times):
            self.graph.replay()


COUNTED, LAYER_BY_LAYER, UNCOUNTED = "with", "layer by layer", "without"


def in_turn(names: list[str], turn: int) -> list[str]:
    """Another order each turn, in which each name is as often first and behind as many others, so that none finds what those
    before it left in the cache more often than another."""
    rounds, first = divmod(turn, len(names))
    order = names[first:] + names[:first]
    return order[::-1] if rounds % 2 else order


class CountedStep:
    """A step of many MoE layers, which take turns on the weights of a few, captured with and without the routing counters, and
    with ids that may not wait for the step's end."""

    def __init__(self, shape: MoeShape, weights: Sequence[Weights], ids: np.ndarray, layers: int):
        batch = ids.shape[1]
        self.counted = CudaRoutingCounters(layers, shape.experts)
        self._ids = torch.from_numpy(np.ascontiguousarray(ids[:, :, 0])).cuda()
        self._picks = torch.zeros(layers, batch, shape.top_k, dtype=torch.int32, device="cuda")
        self._steps = [MoeStep(shape, batch, shape.top_k, Tiles(), "cuda") for _ in weights]
        self._weights = weights
        aligned = [[align(step[:, i], shape.experts, Tiles().m) for i in range(len(weights))] for step in ids]
        self._routes = [[(torch.from_numpy(s).cuda(), torch.from_numpy(e).cuda()) for s, e in step] for step in aligned]
        self._steps[0].x.normal_()
        self.route(0)
        self.counted.begin_step(batch, Phase.DECODE)
        ways = UNCOUNTED, COUNTED, LAYER_BY_LAYER
        self.graphs = {way: capture(partial(self._forward, layers, way)) for way in ways}

    def _forward(self, layers: int, way: str) -> None:
        x = None
        for layer in range(layers):
            if way != UNCOUNTED:
                self.counted.count(layer, self._picks[layer], 0, IdFormat.PLAIN, lasting=way == COUNTED)
            turn = layer % len(self._weights)
            x = self._steps[turn].run(self._weights[turn], x if turn else None)

    def route(self, number: int) -> None:
        for step, (slots, experts) in zip(self._steps, self._routes[number], strict=True):
            step.route(slots, experts)
        self._picks.copy_(self._ids[number])

    def times(self, passes: int) -> dict[str, list[float]]:
        """Milliseconds of each way, of the same routings, the first pass left out."""
        found: dict[str, list[float]] = {name: [] for name in self.graphs}
        turns = itertools.product(range(passes + 1), range(len(self._routes)))
        for turn, (repeat, number) in enumerate(turns):
            self.route(number)
            for name in in_turn([*self.graphs], turn):
                ms = elapsed_ms(self.graphs[name].replay)
                if repeat:
                    found[name].append(ms)
        return found

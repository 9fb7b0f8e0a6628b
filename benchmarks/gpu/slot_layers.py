"""Decode steps over layers with slots, captured once, and the policy on the CPU that must decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.decode_step import capture, elapsed_ms
from benchmarks.gpu.environment import computes
from benchmarks.gpu.moe import MoeStep, Tiles, Weights, align
from benchmarks.gpu.shapes import MoeShape
from benchmarks.gpu.slot_moe import Find, moe_here
from benchmarks.gpu.stream_layers import Layer
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.cuda.staging import CudaStaging
from sglang_uvm_offload.memory.slots import Rows as TensorRows
from sglang_uvm_offload.memory.slots import SlotLayer
from sglang_uvm_offload.policy.slots import WHOLE, SlotPolicy, Tails
from sglang_uvm_offload.routing.counts import SLOT_FILLS, SLOT_HITS, SLOT_KEPT, Phase
from sglang_uvm_offload.sizing.streaming import MOST_BUFFERS
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.slots import ModelSlots
from sglang_uvm_offload.streaming.streamer import Streamer

REPLACED = 4
"""Experts of a layer that are overwritten while a prompt streams."""


class SlotModel:
    """Layers in managed memory, some experts resident and some rows for slots, and the device's slots and the policy's."""

    def __init__(self, memory: CudaMemory, plain: Sequence[Weights], resident: np.ndarray, num_slots: int):
        """``resident``: ``bool[layers, experts]``."""
        self.layers = [
            Layer(memory, i, each, keep, num_slots) for i, (each, keep) in enumerate(zip(plain, resident, strict=True))
        ]
        self.weights = [layer.weights() for layer in self.layers]
        experts = [layer.experts for layer in self.layers]
        self.counters = CudaRoutingCounters(*resident.shape)
        self._slots = ModelSlots(experts, lambda served: CudaSlots(self.counters, served))
        if num_slots and any(self._slots.reasons):
            raise AssertionError(f"a layer has no slots: {self._slots.reasons}")
        self.find: Find = self._slots.at
        self._policy = SlotPolicy(np.ones(resident.shape, dtype=bool), num_slots)
        self.offloaded = np.stack([layer.offloaded_bytes_by_expert for layer in experts])
        self.vram_bytes = sum(layer.resident_bytes + layer.slot_bytes for layer in experts)
        self._share = -(-WHOLE * self.offloaded // max(layer.expert_bytes for layer in experts))
        self.hits, self.fills, self.kept = (np.zeros(resident.shape, dtype=np.int64) for _ in range(3))
        """What the policy decided, by layer and expert."""

    def begin_step(self, ids: np.ndarray) -> None:
        """Before the step with the experts ``ids[tokens, layer, k]``; without tokens nothing is decided."""
        self.counters.begin_step(len(ids), Phase.DECODE)
        self._slots.begin_step(len(ids), Phase.DECODE)
        if len(ids) and self._slots.any:
            self._policy.begin_step()
            resolved = self._policy.resolve(used(ids, self.offloaded.shape[1]), self._share)
            self.hits += resolved.hit
            for layer, expert, _ in resolved.fills:
                self.fills[layer, expert] += 1

    def prefill(self, ids: np.ndarray, plain: Sequence[Weights]) -> Streamed:
        """A prompt of the tokens ``ids[tokens, layer, k]`` streams. The buffers are compared with ``plain``, whose bytes the
        layers hold. So that what comes out of slots shows, own rows of some experts in slots hold other bytes meanwhile."""
        if not self._slots.any:
            return Streamed()
        tokens, layers, _ = ids.shape
        self.counters.begin_step(tokens, Phase.PREFILL)
        self._slots.begin_step(tokens, Phase.PREFILL, [tokens])
        tails = [Tails.of(ids[:, layer], [tokens], self.offloaded.shape[1]) for layer in range(layers)]
        replaced = self._replace_rows()
        experts = [layer.experts for layer in self.layers]
        streamer = Streamer(experts, CudaStaging(0, max(map(buffer_bytes, experts)), MOST_BUFFERS), 1, lambda row, nbytes: None)
        streamer.slot_of = self._slots.slot_of
        streamer.begin_step()
        wrong = 0
        for layer, expected in enumerate(plain):
            reading = streamer.enter(layer)
            if reading is None:
                raise AssertionError(f"layer {layer} does not stream: {streamer.fault}")
            wrong += other_rows(self.layers[layer].weights(), expected)
            rows = torch.from_numpy(ids[:, layer].astype(np.int32)).cuda()
            self._slots.keep(layer, rows, reading.replicas.addresses(reading.buffer))
            streamer.leave(reading)
        streamer.end_step()
        torch.cuda.synchronize()
        for row, right in replaced:
            row.copy_(right)
        self._policy.begin_step()
        both = Tails(np.stack([each.distance for each in tails]), np.stack([each.rate for each in tails]))
        resolved = self._policy.resolve_prefill(np.zeros_like(self.offloaded, dtype=bool), both, self._share)
        for layer, expert, _ in resolved.fills:
            self.kept[layer, expert] += 1
        return Streamed(wrong, layers * self.offloaded.shape[1], len(replaced))

    def _replace_rows(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Overwrite the managed matrices of some experts that slots hold: others are not copied. Returns each with what it must
        hold again."""
        replaced = []
        for index, layer in enumerate(self.layers):
            slot_of = self._slots.slot_of(index)
            held = [] if slot_of is None else np.flatnonzero(slot_of.cpu().numpy())[:REPLACED].tolist()
            managed = {tensor.address for tensor in layer.experts.tensors}
            for weight, right in ((layer.weights().w13, layer.plain.w13), (layer.weights().w2, layer.plain.w2)):
                if weight.data_ptr() in managed:
                    replaced += [(weight[expert], right[expert]) for expert in held]
        for row, _ in replaced:
            other = row.view(torch.uint8)
            other.copy_(torch.full(other.shape, 0xFF, dtype=torch.uint8))
        return replaced

    def wrong_counts(self) -> int:
        """How many hits and fills of an expert the device counted otherwise than the policy."""
        counted = self.counters.read().slots
        if counted is None:
            return 0
        pairs = ((SLOT_HITS, self.hits), (SLOT_FILLS, self.fills))
        wrong = sum(int((counted[:, Phase.DECODE, kind] != wanted).sum()) for kind, wanted in pairs)
        return wrong + int((counted[:, Phase.PREFILL, SLOT_KEPT] != self.kept).sum())


@dataclass(frozen=True)
class Streamed:
    """What a prompt found in stream buffers."""

    wrong: int = 0
    """Experts with other bytes than their own."""
    experts: int = 0
    """Those compared."""
    from_slots: int = 0
    """Matrices of them that the slots alone held."""

    @property
    def compared(self) -> dict[str, int]:
        return {"done": self.experts, "from_slots": self.from_slots}


def other_rows(mine: Weights, expected: Weights) -> int:
    """Experts of which a matrix has other bytes."""
    pairs = [(mine.w13, expected.w13), (mine.w2, expected.w2)]
    raw = [[each.view(torch.int64) if computes() else each.view(torch.int64).cpu() for each in pair] for pair in pairs]
    return sum(not all(torch.equal(a[expert], b[expert]) for a, b in raw) for expert in range(len(mine.w13)))


def used(ids: np.ndarray, experts: int) -> np.ndarray:
    """``bool[layer, expert]`` of ``ids[tokens, layer, k]``."""
    found = np.zeros((ids.shape[1], experts), dtype=bool)
    for layer in range(ids.shape[1]):
        found[layer, ids[:, layer].ravel()] = True
    return found


class SlotDecode:
    """One captured decode step: each layer's output is the next one's input."""

    def __init__(self, shape: MoeShape, tokens: int, weights: Sequence[Weights], find: Find):
        self._moe = moe_here()(shape, tokens, find)
        self._weights = weights
        random = torch.Generator("cuda").manual_seed(tokens)
        self._x = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device="cuda").normal_(generator=random)

        def step() -> None:
            out = self._x
            for layer, each in enumerate(weights):
                out = self._moe.run(layer, each, out)

        self._moe.route(np.tile(np.arange(shape.top_k, dtype=np.int32), (tokens, len(weights), 1)))
        self._graph = capture(step)

    @property
    def kernels(self) -> str:
        return self._moe.kernels

    def route(self, ids: np.ndarray) -> None:
        self._moe.route(ids)

    def replay_ms(self) -> float:
        return elapsed_ms(self._graph.replay)

    def result(self) -> list[torch.Tensor]:
        return self._moe.result(self._weights)


class ResolvedStep:
    """A step of many MoE layers, which take turns on the weights of a few, captured with and without resolving slots, and
    resolving alone. Each expert of the step is in a slot, so nothing is filled. The MoE reads experts at their own rows."""

    ROW_BYTES = 64

    def __init__(self, shape: MoeShape, weights: Sequence[Weights], batch: int, num_slots: int, layers: int):
        self._batch, self._layers, self._weights = batch, layers, weights
        self.counters = CudaRoutingCounters(layers, shape.experts)
        self._rows = torch.zeros((shape.experts + num_slots) * self.ROW_BYTES, dtype=torch.uint8, device="cuda")
        served = SlotLayer([TensorRows(self._rows.data_ptr(), self.ROW_BYTES)], shape.experts, num_slots)
        self.slots = CudaSlots(self.counters, [served] * layers)
        self.slots.set_share(np.full((layers, shape.experts), WHOLE, dtype=np.uint8))
        self._fill(num_slots)
        random = np.random.default_rng(batch)
        ids = np.argsort(random.random((batch, num_slots)), axis=1)[:, : shape.top_k].astype(np.int32)
        order, owners = align(ids, shape.experts, Tiles().m)
        self._ids = torch.from_numpy(ids).cuda()
        self._owners = torch.from_numpy(np.broadcast_to(owners, (layers, owners.size)).copy()).cuda()
        self._blocks = torch.zeros_like(self._owners)
        self._padded = torch.tensor([owners.size * Tiles().m], dtype=torch.int32).cuda()
        self._steps = [MoeStep(shape, batch, shape.top_k, Tiles(), "cuda") for _ in weights]
        for step in self._steps:
            step.route(torch.from_numpy(order), torch.from_numpy(owners))
        self._steps[0].x.normal_()
        self.counters.begin_step(0, Phase.DECODE)
        self.graphs = {
            "without": capture(lambda: self._forward(moe=True, resolving=False)),
            "with": capture(lambda: self._forward(moe=True, resolving=True)),
            "alone": capture(lambda: self._forward(moe=False, resolving=True)),
        }

    def _fill(self, num_slots: int) -> None:
        """Slot after slot gets one of the first experts, in as many steps as the fills of a step allow."""
        ids = torch.arange(num_slots, dtype=torch.int32).view(-1, 8).cuda()
        nothing, none = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        for _ in range(0, num_slots, 64):
            self.begin_step(len(ids))
            for layer in range(self._layers):
                self.slots.resolve(layer, ids, nothing, none, 16)

    def begin_step(self, tokens: int) -> None:
        self.counters.begin_step(tokens, Phase.DECODE)
        self.slots.begin_step()

    def _forward(self, *, moe: bool, resolving: bool) -> None:
        x = None
        for layer in range(self._layers):
            if resolving:
                self.slots.resolve(layer, self._ids, self._blocks[layer], self._padded, Tiles().m)
            if moe:
                turn = layer % len(self._weights)
                x = self._steps[turn].run(self._weights[turn], x if turn else None)

    def times(self, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of each graph, the first two rounds left out."""
        found: dict[str, list[float]] = {name: [] for name in self.graphs}
        for repeat in range(repeats + 2):
            for name in sorted(self.graphs, reverse=bool(repeat % 2)):
                self._blocks.copy_(self._owners)
                self.begin_step(self._batch)
                ms = elapsed_ms(self.graphs[name].replay)
                if repeat > 1:
                    found[name].append(ms)
        return found

    def fills(self) -> int:
        counted = self.counters.read().slots
        assert counted is not None
        return int(counted[:, Phase.DECODE, SLOT_FILLS].sum())

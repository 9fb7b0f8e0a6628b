"""A layer's MoE by one of SGLang's functions, out of plain VRAM, of managed memory and of slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import ClassVar, Protocol

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.moe import align, max_tiles
from benchmarks.gpu.shapes import MoeShape
from benchmarks.gpu.slot_moe import Find, rows_read
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.routing.counts import SLOT_FILLS, SLOT_HITS, Phase
from sglang_uvm_offload.streaming.slots import ModelSlots

Tensors = Mapping[str, torch.Tensor]
"""A layer's tensors by their names in SGLang's module, ``[experts, ...]`` each."""


class MoeFunction(Protocol):
    """One of SGLang's MoE functions with the plugin's hooks, at one batch size."""

    kernels: ClassVar[str]
    """What computes."""

    def __init__(self, shape: MoeShape, tokens: int, find: Find): ...

    @staticmethod
    def weights(shape: MoeShape) -> Tensors:
        """As SGLang leaves them after loading. The outputs are finite."""

    def route(self, ids: np.ndarray) -> None:
        """``ids[tokens, k]`` of the step to come."""

    def run(self, weights: Tensors) -> None: ...

    def result(self, weights: Tensors) -> torch.Tensor:
        """What the last step computed."""


class RowsRead:
    """Where no kernel runs: the bytes of the rows that a step would read, of tensors as large as SGLang's."""

    kernels: ClassVar[str] = "no kernel: the rows that it would read"
    block: ClassVar[int]
    """Rows of tokens that the function's list names an expert for."""

    def __init__(self, shape: MoeShape, tokens: int, find: Find):
        self._find, self._experts = find, shape.experts
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device="cuda")
        self._owners = torch.zeros(max_tiles(self._ids.numel(), shape.experts, self.block), dtype=torch.int32, device="cuda")
        self._blocks = torch.zeros_like(self._owners)
        self._padded = torch.tensor([self._owners.numel() * self.block], dtype=torch.int32).cuda()

    def route(self, ids: np.ndarray) -> None:
        self._ids.copy_(torch.from_numpy(ids))
        self._owners.copy_(torch.from_numpy(align(ids, self._experts, self.block)[1]))

    def run(self, weights: Tensors) -> None:
        self._blocks.copy_(self._owners)
        if slots := self._find(weights["w13_weight"].data_ptr()):
            slots.resolve(self._ids, self._blocks, self._padded, self.block)

    def result(self, weights: Tensors) -> torch.Tensor:
        return torch.cat([rows_read(tensor, self._blocks) for tensor in weights.values()])


def function_here(real: type[MoeFunction], otherwise: type[MoeFunction], *packages: str) -> type[MoeFunction]:
    """Raises ``SystemExit`` where a GPU computes, but what SGLang's function needs is not installed."""
    if not computes():
        return otherwise
    if missing := [name for name in packages if find_spec(name) is None]:
        raise SystemExit(f"{real.kernels} need {' and '.join(missing)} (benchmarks/gpu/README.md)")
    return real


def matrices(shape: MoeShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of both."""
    return {"w13": (2 * shape.intermediate, shape.hidden), "w2": (shape.hidden, shape.intermediate)}


def random_bytes(random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    raw = random.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), "uint8")
    return torch.from_numpy(raw).view(dtype).to(device)


class ServedLayer:
    """The layer in managed memory with slots, ``resident`` (``bool[experts]``) in VRAM."""

    def __init__(self, memory: CudaMemory, plain: Tensors, resident: np.ndarray, num_slots: int):
        experts = len(resident)
        self._layer = ExpertLayer(memory, LayerShard(0, experts), lambda layout: layout.holding(resident), num_slots=num_slots)
        module = torch.nn.Module()
        with AllocationMode(experts, self._layer.allocate):
            for name, tensor in plain.items():
                made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                setattr(module, name, torch.nn.Parameter(made, requires_grad=False))
        self._layer.sync_tensors(module)
        self.weights: Tensors = {name: getattr(module, name).data for name in plain}
        for name, tensor in plain.items():
            self.weights[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        self._module = module
        self._counters = CudaRoutingCounters(1, experts)
        self._slots = ModelSlots([self._layer], lambda served: CudaSlots(self._counters, served))
        if num_slots and any(self._slots.reasons):
            raise AssertionError(f"the layer has no slots: {self._slots.reasons}")
        self.find: Find = self._slots.at

    def begin_step(self, tokens: int) -> None:
        """Without tokens nothing is resolved."""
        self._counters.begin_step(tokens, Phase.DECODE)
        self._slots.begin_step(tokens, Phase.DECODE)

    def missed_bytes(self, ids: np.ndarray) -> int:
        """That a step with these experts has in host RAM, each expert once."""
        return int(self._layer.offloaded_bytes_by_expert[np.unique(ids)].sum())

    def poison(self, experts: np.ndarray) -> None:
        """Other bytes in the own rows of these (numbers), of which scales and biases are NaN. Slots keep theirs."""
        for tensor in self.weights.values():
            for expert in experts.tolist():
                row = tensor[expert].view(torch.uint8)
                row.copy_(torch.full(row.shape, 0xFF, dtype=torch.uint8))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Hits and fills so far, of each expert."""
        counted = self._counters.read().slots
        assert counted is not None
        return counted[0, Phase.DECODE, SLOT_HITS].copy(), counted[0, Phase.DECODE, SLOT_FILLS].copy()


class Replayed:
    """A captured step of one layer."""

    def __init__(self, moe: MoeFunction, weights: Tensors, capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph]):
        self._moe, self._weights = moe, weights
        self._graph = capture(lambda: moe.run(weights))

    def outputs(self, ids: np.ndarray) -> torch.Tensor:
        """Of one replay with the experts ``ids[tokens, k]``."""
        self.replaying(ids)()
        return self._moe.result(self._weights)

    def replaying(self, ids: np.ndarray) -> Callable[[], None]:
        """A replay to come, with these experts."""
        self._moe.route(ids)
        return self._graph.replay

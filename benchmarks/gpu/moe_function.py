"""Runs a layer's MoE with one of SGLang's functions, from plain VRAM, managed memory or slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import SLOT_FILLS, SLOT_HITS, Phase
from sglang_uvm_offload.streaming.model_slots import LayerSlots, ModelSlots

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.seam import Seam

FP8_BLOCK = 128
Find = Callable[[int], "LayerSlots | None"]
AnySeam = TypeVar("AnySeam", bound="Seam")
Tensors = Mapping[str, torch.Tensor]
"""A layer's tensors by their names in SGLang's module, each ``[experts, ...]``."""
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of one expert in each tensor."""


@dataclass(frozen=True)
class MoeShape:
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of both matrices."""
        return {"w13": (2 * self.intermediate, self.hidden), "w2": (self.hidden, self.intermediate)}


class MoeFunction(Protocol):
    """One of SGLang's MoE functions with the plugin's hooks, at one batch size."""

    kernels: ClassVar[str]
    """The name of what computes."""
    needs: ClassVar[tuple[str, ...]]
    """The packages that it needs."""
    block: ClassVar[int]
    """Token rows per block, for which its list names one expert."""

    def __init__(self, shape: MoeShape, tokens: int, find: Find): ...

    @staticmethod
    def sizes(shape: MoeShape) -> Sizes:
        """Returns the tensors' sizes per expert, as SGLang leaves them after loading."""

    @classmethod
    def weights(cls, shape: MoeShape) -> Tensors:
        """Returns such tensors, with values that give finite outputs."""

    def route(self, ids: np.ndarray) -> None:
        """Sets ``ids[tokens, k]`` for the next step."""

    def run(self, weights: Tensors) -> None: ...

    def result(self, weights: Tensors) -> torch.Tensor:
        """Returns the output of the last step."""


class OnTokens:
    """Inputs of the functions at one batch size: tokens, the experts they choose, and equal top-k weights."""

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        self._shape, self._find = shape, find
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device=device)
        self._factors = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device)
        random = torch.Generator(device).manual_seed(tokens)
        self._x = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=device).normal_(generator=random)
        self._out = self._x

    def route(self, ids: np.ndarray) -> None:
        self._ids.copy_(torch.from_numpy(ids))

    def result(self, weights: Tensors) -> torch.Tensor:
        return self._out.clone()


class RowsRead:
    """Used where no kernel runs: returns the bytes of the rows that a step would read, from tensors as large as SGLang's."""

    kernels: ClassVar[str] = "no kernel: the rows that it would read"
    needs: ClassVar[tuple[str, ...]] = ()
    block: ClassVar[int]
    sizes: ClassVar[Callable[[MoeShape], Sizes]]
    """Sizes of one expert by tensor name."""

    def __init__(self, shape: MoeShape, tokens: int, find: Find):
        self._find, self._experts = find, shape.experts
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device="cuda")
        blocks = min(self._ids.numel(), shape.experts + self._ids.numel() // self.block)
        self._owners = torch.zeros(blocks, dtype=torch.int32, device="cuda")
        self._blocks = torch.zeros_like(self._owners)
        self._padded = torch.tensor([blocks * self.block], dtype=torch.int32).cuda()

    @classmethod
    def weights(cls, shape: MoeShape, device: str = "cuda") -> Tensors:
        random, made = np.random.default_rng(1), {}
        for name, (size, dtype) in cls.sizes(shape).items():
            raw = random.integers(0, 256, (shape.experts, *size[:-1], size[-1] * dtype.itemsize), "uint8")
            made[name] = torch.from_numpy(raw).view(dtype).to(device)
        return made

    def route(self, ids: np.ndarray) -> None:
        """Gives each expert its own blocks; unused blocks are -1."""
        self._ids.copy_(torch.from_numpy(ids))
        counts = np.bincount(ids.ravel(), minlength=self._experts)
        owners = np.repeat(np.arange(self._experts), -(-counts // self.block))
        padded = np.pad(owners, (0, self._owners.numel() - owners.size), constant_values=-1)
        self._owners.copy_(torch.from_numpy(padded.astype(np.int32)))

    def run(self, weights: Tensors) -> None:
        self._blocks.copy_(self._owners)
        if slots := self._find(weights["w13_weight"].data_ptr()):
            slots.resolve(self._ids, BlockLists(self._blocks, self._padded, self.block))

    def result(self, weights: Tensors) -> torch.Tensor:
        return torch.cat([rows_read(self._all_rows(tensor), self._blocks) for tensor in weights.values()])

    def _all_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        slots = self._find(tensor.untyped_storage().data_ptr())
        return slots.all_rows(tensor) if slots else tensor


def rows_read(weight: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Returns ``uint8[n, 64]``: digests of the rows that a kernel finds at these indices, also behind the last expert."""
    nbytes = weight.stride(0) * weight.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(weight.untyped_storage())
    numbers = [row for row in blocks.tolist() if row >= 0]
    digests = {row: blake2b(whole[row * nbytes : (row + 1) * nbytes].cpu().numpy().data).digest() for row in set(numbers)}
    return torch.tensor([list(digests[row]) for row in numbers], dtype=torch.uint8)


def function_here(real: type[MoeFunction]) -> type[MoeFunction]:
    """Returns ``real``, or ``RowsRead`` where no kernel runs. Raises ``SystemExit`` if a GPU computes but a package that
    ``real`` needs is missing."""
    if not computes():
        return type("RowsRead", (RowsRead,), {"block": real.block, "sizes": staticmethod(real.sizes)})
    if missing := [name for name in real.needs if find_spec(name) is None]:
        raise SystemExit(f"{real.kernels} need {' and '.join(missing)} (benchmarks/gpu/README.md)")
    return real


def runner_config(shape: MoeShape) -> Any:
    """Returns SGLang's runner config for a server without tensor parallelism."""
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    sizes = {"hidden_size": shape.hidden, "intermediate_size_per_partition": shape.intermediate, "top_k": shape.top_k}
    return MoeRunnerConfig(num_experts=shape.experts, num_local_experts=shape.experts, inplace=False, **sizes)


def installed(seam: AnySeam) -> AnySeam:
    """Installs the plugin's hooks on SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    seam.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    return seam


def without_server(module: Any, settings: SimpleNamespace) -> None:
    """Patches what an SGLang module needs of its server: execution ``settings``, one rank, and plain allocations."""
    module.get_exec = lambda: settings
    module.get_parallel = lambda: SimpleNamespace(tp_group=None)
    module.is_allocation_symmetric = lambda: False
    module.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()


class Fp8Experts:
    """FP8 experts with a scale per 128 x 128 block."""

    @staticmethod
    def sizes(shape: MoeShape) -> Sizes:
        made: Sizes = {}
        for matrix, (n, k) in shape.matrices.items():
            made[f"{matrix}_weight"] = ((n, k), torch.float8_e4m3fn)
            made[f"{matrix}_scale"] = ((n // FP8_BLOCK, k // FP8_BLOCK), torch.float32)
        return made

    @classmethod
    def weights(cls, shape: MoeShape, device: str = "cuda") -> Tensors:
        """Returns finite values, with scales that keep outputs near one."""
        random, made = np.random.default_rng(1), {}
        for matrix, (n, k) in shape.matrices.items():
            values = random.standard_normal((shape.experts, n, k), "float32")
            made[f"{matrix}_weight"] = torch.from_numpy(values).to(device).to(torch.float8_e4m3fn)
            scales = random.uniform(0.5, 1, (shape.experts, n // FP8_BLOCK, k // FP8_BLOCK)).astype("float32") / k**0.5
            made[f"{matrix}_scale"] = torch.from_numpy(scales).to(device)
        return made


class ServedLayer:
    """The layer in managed memory, with slots and with the experts ``resident`` (``bool[experts]``) in VRAM."""

    def __init__(self, memory: CudaMemory, plain: Tensors, resident: np.ndarray, num_slots: int):
        experts = len(resident)
        model = ModelExperts(draft=False)
        self._layer = model.add_layer(memory, LayerShard(0, experts))
        self._layer.join_pool(partial(model.pool_for, self._layer))
        self._layer.place(lambda layout: layout.holding(resident), num_slots=num_slots)
        module = torch.nn.Module()
        with AllocationMode(experts, self._layer.allocate):
            for name, tensor in plain.items():
                self._set_parameter(module, name, tensor)
        self._layer.sync_tensors(module)
        model.place_slots()
        self.weights: Tensors = {name: getattr(module, name).data for name in plain}
        for name, tensor in plain.items():
            self.weights[name].view(torch.uint8).copy_(tensor.view(torch.uint8))
        self._module = module
        self._counters = CudaRoutingCounters(1, experts)
        self._slots = ModelSlots([self._layer], partial(CudaSlots, self._counters))
        if num_slots and any(self._slots.reasons):
            raise AssertionError(f"the layer has no slots: {self._slots.reasons}")
        self.find: Find = self._slots.at

    @staticmethod
    def _set_parameter(module: torch.nn.Module, name: str, like: torch.Tensor) -> None:
        """A separate function, so that no local of the caller keeps the tensor alive: it must move to its home in the pool."""
        made = torch.empty(like.shape, dtype=like.dtype, device="cuda")
        setattr(module, name, torch.nn.Parameter(made, requires_grad=False))

    def begin_step(self, tokens: int) -> None:
        """Begins a step. With 0 tokens it resolves nothing."""
        self._counters.begin_step(tokens, Phase.DECODE)
        self._slots.begin_step(tokens, Phase.DECODE)

    def missed_bytes(self, ids: np.ndarray) -> int:
        """Returns the bytes in host RAM that a step with these experts reads, each expert once."""
        return int(self._layer.offloaded_bytes_by_expert[np.unique(ids)].sum())

    def poison(self, experts: np.ndarray) -> None:
        """Overwrites these experts' own rows, which makes scales and biases NaN. Slots keep their bytes."""
        for tensor in self.weights.values():
            for expert in experts.tolist():
                row = tensor[expert].view(torch.uint8)
                row.copy_(torch.full(row.shape, 0xFF, dtype=torch.uint8))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns hits and fills so far, ``int[experts]`` each."""
        counted = self._counters.read().slots
        assert counted is not None
        return counted[0, Phase.DECODE, SLOT_HITS].copy(), counted[0, Phase.DECODE, SLOT_FILLS].copy()


class Replayed:
    """A captured step of one layer."""

    def __init__(self, moe: MoeFunction, weights: Tensors, capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph]):
        self._moe, self._weights = moe, weights
        self._graph = capture(lambda: moe.run(weights))

    def outputs(self, ids: np.ndarray) -> torch.Tensor:
        """Replays once with the experts ``ids[tokens, k]`` and returns the output."""
        self.replaying(ids)()
        return self._moe.result(self._weights)

    def replaying(self, ids: np.ndarray) -> Callable[[], None]:
        """Sets these experts and returns the replay."""
        self._moe.route(ids)
        return self._graph.replay

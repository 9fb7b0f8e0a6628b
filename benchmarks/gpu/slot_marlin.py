"""A layer of MXFP4 experts by SGLang's Marlin MoE function, out of plain VRAM and out of slots.

MXFP4, because SGLang's kernels add nothing atomically there: the outputs of a call do not vary from run to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
from environment import computes
from moe import Tiles, align, max_tiles
from shapes import MoeShape
from slot_moe import Find, rows_read

from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.cuda.slots import CudaSlots
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.routing.counts import SLOT_FILLS, SLOT_HITS, Phase
from sglang_uvm_offload.slots.model import ModelSlots

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slot_seam_marlin import MarlinSlotSeam

Tensors = Mapping[str, torch.Tensor]
"""A layer's tensors by their names in SGLang's module, ``[experts, ...]`` each."""
NAMES = tuple(f"{matrix}_weight{what}" for what in ("", "_scale", "_bias") for matrix in ("w13", "w2"))
GROUP = 32
"""Values that share a scale."""


class SglangMarlin:
    """SGLang's ``fused_marlin_moe`` with the plugin's hooks, at one batch size."""

    kernels = "SGLang's Marlin kernels"

    def __init__(self, shape: MoeShape, tokens: int, find: Find, device: str = "cuda"):
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

        self._find = find
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device=device)
        self._factors = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device=device)
        self._logits = torch.zeros(tokens, shape.experts, device=device)
        self._workspace = marlin_make_workspace(torch.device(device), 4)
        random = torch.Generator(device).manual_seed(tokens)
        self._x = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=device).normal_(generator=random)

    @staticmethod
    def weights(shape: MoeShape, device: str = "cuda") -> Tensors:
        """Of a checkpoint's format, repacked by SGLang. Scales keep outputs near one."""
        from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

        random, module = np.random.default_rng(1), torch.nn.Module()
        for matrix, (n, k) in matrices(shape).items():
            values = random.integers(0, 256, (shape.experts, n, k // 2), "uint8")
            scales = random.integers(118, 122, (shape.experts, n, k // GROUP), "uint8")
            bias = random.standard_normal((shape.experts, n), "float32")
            made = (values, scales, bias)
            for name, array in zip((f"{matrix}_weight{what}" for what in ("", "_scale", "_bias")), made, strict=True):
                tensor = torch.from_numpy(array).to(device)
                typed = tensor.bfloat16() if array is bias else tensor
                setattr(module, name, torch.nn.Parameter(typed, requires_grad=False))
        prepare_moe_mxfp4_layer_for_marlin(module)
        return {name: getattr(module, name).data for name in NAMES}

    def route(self, ids: np.ndarray) -> None:
        """``ids[tokens, k]`` of the step to come."""
        self._ids.copy_(torch.from_numpy(ids))

    def run(self, weights: Tensors) -> None:
        from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe

        installed_seam().find = self._find
        self._out = fused_marlin_moe.fused_marlin_moe(
            self._x,
            weights["w13_weight"],
            weights["w2_weight"],
            weights["w13_weight_scale"],
            weights["w2_weight_scale"],
            self._logits,
            self._factors,
            self._ids,
            w1_bias=weights["w13_weight_bias"],
            w2_bias=weights["w2_weight_bias"],
            workspace=self._workspace,
            num_bits=4,
        )

    def result(self, weights: Tensors) -> torch.Tensor:
        """What the last step computed."""
        return self._out.clone()


@functools.cache
def installed_seam() -> MarlinSlotSeam:
    """The plugin's hooks on SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_uvm_offload.plugin.slot_seam_marlin import MarlinSlotSeam

    seam = MarlinSlotSeam()
    seam.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    return seam


class RowsRead:
    """Where no kernel runs: the bytes of the rows that a step would read, of tensors as large as SGLang's."""

    kernels = "no kernel: the rows that it would read"

    def __init__(self, shape: MoeShape, tokens: int, find: Find):
        self._find, self._experts = find, shape.experts
        self._ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device="cuda")
        self._owners = torch.zeros(max_tiles(self._ids.numel(), shape.experts, Tiles().m), dtype=torch.int32, device="cuda")
        self._blocks = torch.zeros_like(self._owners)
        self._padded = torch.tensor([self._owners.numel() * Tiles().m], dtype=torch.int32).cuda()

    @staticmethod
    def weights(shape: MoeShape, device: str = "cuda") -> Tensors:
        random, made = np.random.default_rng(1), {}
        for matrix, (n, k) in matrices(shape).items():
            sizes = {"": (k // 16, 2 * n, torch.int32), "_scale": (k // GROUP, n, torch.float8_e8m0fnu)}
            for what, (high, wide, dtype) in (sizes | {"_bias": (1, n, torch.bfloat16)}).items():
                raw = random.integers(0, 256, (shape.experts, high, wide * dtype.itemsize), "uint8")
                made[f"{matrix}_weight{what}"] = torch.from_numpy(raw).view(dtype).to(device)
        return {name: made[name] for name in NAMES}

    def route(self, ids: np.ndarray) -> None:
        self._ids.copy_(torch.from_numpy(ids))
        self._owners.copy_(torch.from_numpy(align(ids, self._experts, Tiles().m)[1]))

    def run(self, weights: Tensors) -> None:
        self._blocks.copy_(self._owners)
        if slots := self._find(weights["w13_weight"].data_ptr()):
            slots.resolve(self._ids, self._blocks, self._padded, Tiles().m)

    def result(self, weights: Tensors) -> torch.Tensor:
        return torch.cat([rows_read(tensor, self._blocks) for tensor in weights.values()])


Marlin = SglangMarlin | RowsRead


def marlin_here() -> type[Marlin]:
    """Raises ``SystemExit`` where a GPU computes, but SGLang's kernels are not installed."""
    if not computes():
        return RowsRead
    if missing := [name for name in ("sglang", "sgl_kernel") if find_spec(name) is None]:
        raise SystemExit(f"SGLang's Marlin kernels need {' and '.join(missing)} (benchmarks/gpu/README.md)")
    return SglangMarlin


def matrices(shape: MoeShape) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of both."""
    return {"w13": (2 * shape.intermediate, shape.hidden), "w2": (shape.hidden, shape.intermediate)}


class MarlinLayer:
    """The layer in managed memory with slots, ``resident`` (``bool[experts]``) in VRAM."""

    def __init__(self, memory: CudaMemory, plain: Tensors, resident: np.ndarray, num_slots: int):
        experts = len(resident)
        self._layer = ExpertLayer(memory, 0, experts, 0, 0, lambda layout: layout.holding(resident), num_slots=num_slots)
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
        if any(self._slots.reasons):
            raise AssertionError(f"the layer has no slots: {self._slots.reasons}")
        self.find: Find = self._slots.at

    def begin_step(self, tokens: int) -> None:
        """Without tokens nothing is resolved."""
        self._counters.begin_step(tokens, Phase.DECODE)
        self._slots.begin_step(tokens, Phase.DECODE)

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

    def __init__(self, moe: Marlin, weights: Tensors, capture: Callable[[Callable[[], object]], torch.cuda.CUDAGraph]):
        self._moe, self._weights = moe, weights
        self._graph = capture(lambda: moe.run(weights))

    def outputs(self, ids: np.ndarray) -> torch.Tensor:
        """Of one replay with the experts ``ids[tokens, k]``."""
        self._moe.route(ids)
        self._graph.replay()
        return self._moe.result(self._weights)

"""A layer's MoE over rows of experts and slots: SGLang's own Triton functions, or this folder's kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu.environment import computes
from benchmarks.gpu.moe import MoeStep, Tiles, Weights, align
from benchmarks.gpu.shapes import FP8_BLOCK, MoeShape
from sglang_uvm_offload.streaming.slots import LayerSlots

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.slots.triton import SlotSeam

Find = Callable[[int], "LayerSlots | None"]


class SglangMoe:
    """SGLang's ``fused_experts`` with the plugin's hooks, as a server without tensor parallelism calls it."""

    kernels = "SGLang's kernels"

    def __init__(self, shape: MoeShape, tokens: int, find: Find):
        from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

        seam = installed_seam()
        seam.find = find
        self._config = MoeRunnerConfig(
            num_experts=shape.experts,
            num_local_experts=shape.experts,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            intermediate_size_per_partition=shape.intermediate,
            activation="silu",
            inplace=False,
        )
        self._ids = torch.zeros(shape.layers, tokens, shape.top_k, dtype=torch.int32, device="cuda")
        self._factors = torch.full((tokens, shape.top_k), 1.0 / shape.top_k, device="cuda")
        self._outputs: dict[int, torch.Tensor] = {}

    def route(self, ids: np.ndarray) -> None:
        """``ids[tokens, layer, k]`` of the step to come."""
        self._ids.copy_(torch.from_numpy(np.ascontiguousarray(ids.transpose(1, 0, 2))))

    def run(self, layer: int, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        block = {"block_shape": [FP8_BLOCK, FP8_BLOCK], "w1_scale": weights.scale13, "w2_scale": weights.scale2}
        how: dict[str, Any] = {"use_fp8_w8a8": True, **block} if weights.fp8 else {}
        topk = StandardTopKOutput(self._factors, self._ids[layer], None)
        self._outputs[layer] = fused_moe.fused_experts(x, weights.w13, weights.w2, topk, self._config, **how)
        return self._outputs[layer]

    def result(self, layers: Sequence[Weights]) -> list[torch.Tensor]:
        """What the last replay computed, by layer."""
        return [self._outputs[layer] for layer in range(len(layers))]


@functools.cache
def installed_seam() -> SlotSeam:
    """The plugin's hooks on SGLang's functions, and what these ask of a server that does not run here."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_uvm_offload.plugin.slots.triton import SlotSeam

    settings = SimpleNamespace(
        moe=SimpleNamespace(enable_fused_moe_sum_all_reduce=False),
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )
    for module in (fused_moe, fused_moe_triton_config):
        without_server(module, settings)
    seam = SlotSeam()
    seam.install(HookRegistry.register)
    HookRegistry.apply_hooks()
    return seam


def without_server(module: Any, settings: SimpleNamespace) -> None:
    """What a module of SGLang's asks of its server: ``settings`` of execution, one rank, and plain allocations."""
    module.get_exec = lambda: settings
    module.get_parallel = lambda: SimpleNamespace(tp_group=None)
    module.is_allocation_symmetric = lambda: False
    module.use_symmetric_memory = lambda *_, **__: contextlib.nullcontext()


class OwnMoe:
    """The kernels of ``moe.py``. Where none runs, the rows that a step would read stand for what it computes."""

    kernels = "this folder's kernels"

    def __init__(self, shape: MoeShape, tokens: int, find: Find):
        self._find = find
        self._steps = [MoeStep(shape, tokens, shape.top_k, Tiles(), "cuda") for _ in range(shape.layers)]
        self._ids = torch.zeros(shape.layers, tokens, shape.top_k, dtype=torch.int32, device="cuda")
        self._owners = torch.zeros(shape.layers, self._steps[0].experts.numel(), dtype=torch.int32, device="cuda")
        self._padded = torch.tensor([self._owners.shape[1] * Tiles().m], dtype=torch.int32).cuda()

    def route(self, ids: np.ndarray) -> None:
        self._ids.copy_(torch.from_numpy(np.ascontiguousarray(ids.transpose(1, 0, 2))))
        for layer, step in enumerate(self._steps):
            slots, owners = align(ids[:, layer], step.shape.experts, step.tiles.m)
            step.slots.copy_(torch.from_numpy(slots))
            self._owners[layer].copy_(torch.from_numpy(owners))

    def run(self, layer: int, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        step = self._steps[layer]
        step.experts.copy_(self._owners[layer])
        if slots := self._find(weights.w13.data_ptr()):
            slots.resolve(self._ids[layer], step.experts, self._padded, step.tiles.m)
        return step.run(weights, x)

    def result(self, layers: Sequence[Weights]) -> list[torch.Tensor]:
        if computes():
            return [step.out for step in self._steps]
        return [
            torch.cat([rows_read(weight, step.experts) for weight in (weights.w13, weights.w2)])
            for step, weights in zip(self._steps, layers, strict=True)
        ]


def rows_read(weight: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """``uint8[n, 64]``: digests of the rows that a kernel finds by these numbers, also of those behind the last expert. Many
    blocks read one row, and all padding reads expert 0."""
    nbytes = weight.stride(0) * weight.element_size()
    whole = torch.empty(0, dtype=torch.uint8, device=weight.device).set_(weight.untyped_storage())
    numbers = [row for row in blocks.tolist() if row >= 0]
    digests = {row: blake2b(whole[row * nbytes : (row + 1) * nbytes].cpu().numpy().data).digest() for row in set(numbers)}
    return torch.tensor([list(digests[row]) for row in numbers], dtype=torch.uint8)


def moe_here() -> type[SglangMoe] | type[OwnMoe]:
    return SglangMoe if computes() and find_spec("sglang") else OwnMoe

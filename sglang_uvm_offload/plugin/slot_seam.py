"""Hooks on SGLang's Triton MoE functions, by which an expert is computed from its copy in a slot.

Every tensor of a layer with slots has rows behind those of its experts, at the same stride. SGLang makes a list that names the
expert of each block of tokens; where an expert has a copy, the list is rewritten to name the copy's row. The kernels multiply
the row by the stride and check no bounds, so nothing else of SGLang sees the additional rows. TMA descriptors do check bounds:
those of such tensors span all rows.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.slots.model import LayerSlots

logger = logging.getLogger(__name__)

_EXPERTS = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.fused_experts"
_PREPARE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe._prepare_fused_moe_run"
_DESCRIPTOR = "sglang.kernels.ops.moe.fused_moe_triton_kernels._get_b_tma_desc_cached"

_FIRST = ("hidden_states", "w1", "w2", "topk_output", "moe_runner_config")
"""The first parameters of SGLang's ``fused_experts``. Its callers name all others."""
_BY_EXPERT = ("w1", "w2", "b1", "b2", "w1_scale", "w2_scale", "w1_zp", "w2_zp")
"""Its parameters that its kernels read at the row of an expert."""


class SlotSeam:
    """``find`` tells the slots of the layer that has a tensor at an address.

    A layer that computes from a stream buffer, or from a tensor that is not its own, keeps its list: the same list serves the
    weights, their scales, zero points and biases, and each of these must have the rows.
    """

    def __init__(self) -> None:
        self.find: Callable[[int], LayerSlots | None] = _nothing
        self._computing: LayerSlots | None = None
        self._told: set[str] = set()

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_EXPERTS, self._around_experts, HookType.AROUND)
        add(_PREPARE, self._around_prepare, HookType.AROUND)
        add(_DESCRIPTOR, self._around_descriptor, HookType.AROUND)

    def _around_experts(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = kwargs | dict(zip(_FIRST, args, strict=False))
        slots = self.find(given["w1"].data_ptr())
        if slots is not None and len(args) <= len(_FIRST):
            self._computing = slots if self._all_have_rows(slots, given) else None
        try:
            return original(*args, **kwargs)
        finally:
            self._computing = None

    def _all_have_rows(self, slots: LayerSlots, given: dict[str, Any]) -> bool:
        for name in _BY_EXPERT:
            tensor = given.get(name)
            if tensor is not None and _row_bytes(tensor) != slots.row_bytes.get(tensor.untyped_storage().data_ptr()):
                self._tell(f"{name} {tuple(tensor.shape)} is none of the layer's tensors, so its experts are read in place")
                return False
        return True

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("Expert offload: slots: %s", what)

    def _around_prepare(
        self,
        original: Callable[..., Any],
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        **kwargs: Any,
    ) -> Any:
        prepared = original(hidden_states, w1, w2, topk_ids, **kwargs)
        slots = self._computing
        if slots is not None and w1.data_ptr() in slots.row_bytes and w2.data_ptr() in slots.row_bytes:
            config, _, _, _, _, blocks, padded = prepared
            slots.resolve(topk_ids, blocks, padded, config["BLOCK_SIZE_M"])
        return prepared

    def _around_descriptor(self, original: Callable[..., Any], weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """SGLang caches the descriptor of the experts alone, by tensor and address. This widens a copy of it at each call."""
        descriptor = original(weights, *args, **kwargs)
        slots = self.find(weights.data_ptr())
        return descriptor if slots is None else dataclasses.replace(descriptor, shape=[slots.num_rows, *descriptor.shape[1:]])


def _nothing(address: int) -> None:
    return None


def _row_bytes(tensor: torch.Tensor) -> int:
    """From one expert to the next."""
    return tensor.stride(0) * tensor.element_size() if tensor.dim() else 0

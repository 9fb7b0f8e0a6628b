"""Hooks on SGLang's Triton MoE functions, by which an expert is computed from its copy in a slot.

Every tensor of a layer with slots has rows behind those of its experts, at the same stride. SGLang makes a list that names the
expert of each block of tokens; where an expert has a copy, the list is rewritten to name the copy's row. The kernels multiply
the row by the stride and check no bounds, so nothing else of SGLang sees the additional rows. TMA descriptors do check bounds:
those of such tensors span all rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
from sglang.srt.plugins.hook_registry import HookType

_PREPARE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe._prepare_fused_moe_run"
_DESCRIPTOR = "sglang.kernels.ops.moe.fused_moe_triton_kernels._get_b_tma_desc_cached"


class LayerSlots(Protocol):
    """The slots of one layer."""

    num_rows: int
    """Of each of the layer's tensors: its experts and its slots."""

    def resolve(self, ids: torch.Tensor, blocks: torch.Tensor, padded: torch.Tensor, block_size: int) -> None:
        """Rewrite ``blocks`` in place, on the current stream, also while a graph is captured.

        ``ids`` int32 or int64 ``[tokens, top_k]``: the local experts of each token, -1 for another rank's. ``blocks`` int32:
        the expert of each ``block_size`` rows, ascending, -1 first; only the first ``padded[0] / block_size`` are set.
        ``padded`` int32 ``[1]``: the rows of all blocks."""


class SlotSeam:
    """The layers with slots, by the addresses of their weights.

    A layer that computes from a stream buffer, or whose weights were replaced, has other addresses: its list stays as it is.
    Call ``clear`` when tensors may have been freed: a new tensor may get the address of one.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], LayerSlots] = {}
        self._rows: dict[int, int] = {}
        """Of the tensor at each address."""

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(_PREPARE, self._around_prepare, HookType.AROUND)
        add(_DESCRIPTOR, self._around_descriptor, HookType.AROUND)

    def add(self, w1_address: int, w2_address: int, slots: LayerSlots) -> None:
        """The layer whose two weights are at these addresses computes from ``slots``."""
        self._layers[w1_address, w2_address] = slots
        self._rows[w1_address] = self._rows[w2_address] = slots.num_rows

    def clear(self) -> None:
        """No layer computes from slots."""
        self._layers.clear()
        self._rows.clear()

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
        slots = self._layers.get((w1.data_ptr(), w2.data_ptr()))
        if slots is not None:
            config, _, _, _, _, blocks, padded = prepared
            slots.resolve(topk_ids, blocks, padded, config["BLOCK_SIZE_M"])
        return prepared

    def _around_descriptor(self, original: Callable[..., Any], weights: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """SGLang caches the descriptor of the experts alone, by tensor and address. This widens a copy of it at each call, so
        that none outlives ``clear``."""
        descriptor = original(weights, *args, **kwargs)
        rows = self._rows.get(weights.data_ptr())
        return descriptor if rows is None else dataclasses.replace(descriptor, shape=[rows, *descriptor.shape[1:]])

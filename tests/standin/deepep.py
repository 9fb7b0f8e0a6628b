"""Replaces DeepEP's library, whose ranks write to each other's GPUs: its buffers have the real size, but receive no tokens."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import deepep


class _Over:
    """An event that has always happened."""

    def current_stream_wait(self) -> None:
        pass


class Buffer(deepep.Buffer):  # type: ignore[misc,valid-type]  # the library's
    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool, **options: Any):
        self.group_size, self.low_latency_mode = group.size(), low_latency_mode
        self.memory = torch.empty(num_nvl_bytes + num_rdma_bytes, dtype=torch.uint8, device="cuda")

    def low_latency_dispatch(
        self, rows: torch.Tensor, topk_ids: torch.Tensor, most: int, num_experts: int, **options: Any
    ) -> tuple[Any, ...]:
        local = num_experts // self.group_size
        received = rows.new_zeros(local, most * self.group_size, rows.size(1))
        return received, torch.zeros(local, dtype=torch.int32, device=rows.device), None, _Over(), lambda: None

    def low_latency_combine(self, x: torch.Tensor, topk_idx: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        return x.new_zeros(topk_idx.size(0), x.size(-1)), _Over(), lambda: None

    def clean_low_latency_buffer(self, *sizes: int) -> None:
        pass


def install() -> None:
    deepep.Buffer = Buffer
    deepep._is_mnnvl_fabric_supported = lambda: False

"""Hooks on SGLang's ``NgramEmbedding`` that keep its tables in host RAM, where kernels read a token's rows in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.experts.layer import check_host_ram
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.layout import whole_blocks
from sglang_uvm_offload.memory.protocol import Memory, Span
from sglang_uvm_offload.plan.lookup_tables import TABLES_FLAG
from sglang_uvm_offload.plugin.rank.start_clock import StartPhase

_NGRAMS = "sglang.srt.layers.n_gram_embedding.NgramEmbedding"
_TABLE = "sglang.srt.layers.quantization.unquant.UnquantizedEmbeddingMethod"


class TableHooks:
    """Allocates the tables without residents, because each token reads only a few KiB at random."""

    def __init__(self, memory: Callable[[], Memory], timing: Callable[[StartPhase], AbstractContextManager[None]]):
        self._memory = memory
        self._timing = timing
        self._building: torch.nn.Module | None = None
        """The embedding being built."""
        self.nbytes = 0
        """Host RAM of all tables, in whole blocks."""

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        add(f"{_NGRAMS}.__init__", self._around_init, HookType.AROUND)
        add(f"{_TABLE}.create_weights", self._around_create_weights, HookType.AROUND)

    def _around_init(self, original: Callable[..., None], module: Any, *args: Any, **kwargs: Any) -> None:
        before, self._building = self.nbytes, module
        try:
            original(module, *args, **kwargs)
        finally:
            self._building = None
        if self.nbytes == before and not module.oe_embeder.weight.is_meta:
            raise FlagError([f"{TABLES_FLAG} host: this SGLang allocates n-gram tables differently; remove it"])

    def _around_create_weights(
        self, original: Callable[..., None], method: Any, layer: Any, width: int, rows: list[int], *args: Any, **kwargs: Any
    ) -> None:
        # The word embedding is built first. Every token reads it, so it stays in VRAM.
        if self._building is None or not hasattr(self._building, "word_embeder"):
            original(method, layer, width, rows, *args, **kwargs)
            return
        with self._timing(StartPhase.PLACE), AllocationMode(sum(rows), partial(self._allocate, sum(rows))):
            original(method, layer, width, rows, *args, **kwargs)

    def _allocate(self, rows: int, row_bytes: int, device: torch.device, description: str) -> torch.Tensor | None:
        """``takeover.Allocate`` for a table of ``rows``."""
        memory, nbytes, name = self._memory(), rows * row_bytes, f"{description} of n-grams"
        if device.type != memory.device_type:
            return None
        check_host_ram(memory, "allocate", name, whole_blocks(nbytes))
        managed = memory.allocate(nbytes, name)
        flat = memory.tensor(managed)
        memory.populate(managed, [Span(0, nbytes)])
        self.nbytes += whole_blocks(nbytes)
        return flat

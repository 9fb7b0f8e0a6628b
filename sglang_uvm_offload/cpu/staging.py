"""``Staging`` for a model that computes on the CPU: a copy is over when the call returns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.memory.staging import Part


class CpuStaging:
    """Buffers in ordinary memory."""

    def __init__(self, memory: Memory, nbytes: int, count: int):
        self._memory = memory
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]

    def may_copy(self) -> bool:
        return True

    def begin_step(self) -> None:
        """All that was launched is over."""

    def copy(self, buffer: int, parts: Sequence[Part], in_vram: Sequence[np.ndarray] = ()) -> None:
        for part in parts:
            target = self.buffers[buffer][part.offset : part.offset + part.nbytes]
            target.copy_(self._memory.tensor(part.managed)[: part.nbytes])

    def acquire(self, buffer: int) -> None:
        """The copy is over."""

    def release(self, buffer: int) -> None:
        """The reader is over."""

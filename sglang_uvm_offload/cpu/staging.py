"""``Staging`` for a model that computes on the CPU. A copy is complete when the call returns."""

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
        """Nothing to do: no copy is in flight."""

    def copy(self, buffer: int, parts: Sequence[Part], in_vram: Sequence[np.ndarray] = ()) -> None:
        for part in parts:
            target = self.buffers[buffer][part.offset : part.offset + part.nbytes]
            target.copy_(self._memory.tensor(part.managed)[: part.nbytes])

    def acquire(self, buffer: int) -> None:
        """Nothing to do: the copy is complete."""

    def release(self, buffer: int) -> None:
        """Nothing to do: the reader has finished."""

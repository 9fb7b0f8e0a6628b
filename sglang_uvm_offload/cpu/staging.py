"""``Staging`` for a model that computes on the CPU: a copy is over when the call returns."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_uvm_offload.memory.protocol import ManagedRange, Memory


class CpuStaging:
    """Buffers in ordinary memory."""

    def __init__(self, memory: Memory, nbytes: int, count: int):
        self._memory = memory
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]

    def may_copy(self) -> bool:
        return True

    def begin_step(self) -> None:
        """All that was launched is over."""

    def copy(self, buffer: int, parts: Sequence[tuple[ManagedRange, int]]) -> None:
        for managed, offset in parts:
            self.buffers[buffer][offset : offset + managed.nbytes].copy_(self._memory.tensor(managed))

    def acquire(self, buffer: int) -> None:
        """The copy is over."""

    def release(self, buffer: int) -> None:
        """The reader is over."""

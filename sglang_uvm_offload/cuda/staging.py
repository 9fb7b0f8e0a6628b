"""``Staging`` on a GPU: a kernel with few thread blocks copies alongside the steps on its own CUDA stream.

Only events order copies and readers. The stream has a high priority, so a copy's few blocks start as soon as any block of
another kernel ends, instead of after all of that kernel's blocks have started.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.cuda.structs import CudaFailure
from sglang_uvm_offload.memory.protocol import Span
from sglang_uvm_offload.memory.staging import LINK_BLOCKS, VRAM_BLOCKS, Part


class CudaStaging:
    """Buffers in plain VRAM of the GPU ``device``. The constructor raises ``torch.OutOfMemoryError``."""

    def __init__(self, device: int, nbytes: int, count: int):
        self._device = torch.device("cuda", device)
        self._ops = device_ops(device)
        self.vram_blocks = VRAM_BLOCKS
        self.buffers = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in range(count)]
        self._claimed = torch.zeros(2, dtype=torch.int32).to(self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def may_copy(self) -> bool:
        return not torch.cuda.is_current_stream_capturing()

    def begin_step(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, buffer: int, parts: Sequence[Part], in_vram: Sequence[np.ndarray] = ()) -> None:
        first = self.buffers[buffer].data_ptr()
        copies = [(part.managed.address, first + part.offset, part.nbytes) for part in parts]
        caller = torch.cuda.current_stream(self._device).cuda_stream
        try:
            for begin in range(0, len(copies), self._ops.max_copies):
                end = begin + self._ops.max_copies
                near = np.concatenate([np.zeros(0, dtype=bool), *in_vram[begin:end]])
                blocks, mine = (LINK_BLOCKS, self.vram_blocks), self._stream.cuda_stream
                self._ops.copy_layer(self._device.index, copies[begin:end], near, blocks, self._claimed, caller, mine)
        except CudaFailure as failure:
            names = ", ".join(part.managed.name for part in parts)
            span = Span(0, sum(part.nbytes for part in parts))
            raise failure.on(names, span) from failure
        self._copied[buffer].record(self._stream)

    def acquire(self, buffer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def release(self, buffer: int) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

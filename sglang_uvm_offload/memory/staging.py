"""The ``Staging`` protocol: stream buffers in plain VRAM, into which whole layers are copied alongside the steps.

Two modules implement it: ``cuda/staging`` (a copy kernel on its own CUDA stream) and ``cpu/staging`` (immediate copies).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from sglang_uvm_offload.memory.protocol import ManagedRange

if TYPE_CHECKING:
    import torch

LINK_BLOCKS = 16
"""Thread blocks of the GPU copy kernel that read over the link: enough to saturate it beside a kernel that is bound by VRAM."""
VRAM_BLOCKS = 96
"""Thread blocks that copy what is already in VRAM. Beside a MoE kernel on an H200 with 95 % of a layer resident, 96 copy 1.4 to
1.6 times as fast as 48 at the same total cost. With 78 % resident the link is the limit, and both are alike."""


class Part(NamedTuple):
    """The first ``nbytes`` of a managed range, and their offset in a buffer."""

    managed: ManagedRange
    nbytes: int
    offset: int
    """A multiple of 16."""


class Staging(Protocol):
    """Equally sized buffers, one layer in each. Copies run one after the other, in call order. No call waits for the device.
    Use from one thread at a time."""

    buffers: list[torch.Tensor]
    """``uint8[nbytes]`` each, at a fixed address. A buffer may be read between ``acquire`` and ``release``."""

    def may_copy(self) -> bool:
        """Whether the calling stream may wait for copies, that is, it is not capturing a graph, whose replays would not
        copy."""

    def begin_step(self) -> None:
        """Order later copies after the work enqueued on the calling stream, which may write experts between steps."""

    def copy(self, buffer: int, parts: Sequence[Part], in_vram: Sequence[np.ndarray] = ()) -> None:
        """Start copying the parts to the buffer, after its last ``release``. Experts may move meanwhile. ``in_vram`` is a
        ``bool[blocks]`` per part of recently resident blocks. A stale map costs time, never correctness. Raises
        ``ManagedMemoryError``, which leaves the buffer undefined."""

    def acquire(self, buffer: int) -> None:
        """Make later work on the calling stream wait for the buffer's last copy."""

    def release(self, buffer: int) -> None:
        """Order later copies after the work enqueued on the calling stream, which has stopped reading the buffer."""

"""The ``Staging`` protocol: buffers in plain VRAM into which the experts of whole layers are copied, alongside the steps.

Two modules implement it: ``cuda/staging`` (a copying kernel on a CUDA stream of its own) and ``cpu/staging`` (copies at once).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from sglang_uvm_offload.memory.protocol import ManagedRange

if TYPE_CHECKING:
    import torch

LINK_BLOCKS = 16
"""Of the kernel that copies on a GPU, as many read over the link: they keep it busy beside a kernel that is bound by VRAM."""
VRAM_BLOCKS = 96
"""As many copy what is in VRAM already. Beside a MoE, on an H200 with 95 % of a layer resident, they copy 1.4 to 1.6 times as
fast as 48 and cost it no more in all; with 78 %, where the link is the limit, the two are alike."""


class Part(NamedTuple):
    """The first ``nbytes`` bytes of a managed range, and where they go in a buffer."""

    managed: ManagedRange
    nbytes: int
    offset: int
    """A multiple of 16."""


class Staging(Protocol):
    """Equal buffers, one layer in each. Copies run one after the other, in the order of the calls; no call waits for the
    device. One thread at a time may use it."""

    buffers: list[torch.Tensor]
    """``uint8[nbytes]`` each, with one address for life. Its bytes may be read between ``acquire`` and ``release``."""

    def may_copy(self) -> bool:
        """Whether the calling stream may wait for copies: not while it captures a graph, which would copy nothing at its
        replays."""

    def begin_step(self) -> None:
        """Copies from now on come after all that the calling stream has been given: it may write experts between steps."""

    def copy(self, buffer: int, parts: Sequence[Part], in_vram: Sequence[np.ndarray] = ()) -> None:
        """Begin to copy the parts to the buffer, after the last ``release``. Bytes are read wherever they lie, so they may move
        meanwhile. ``in_vram``: of each part ``bool[blocks]``, those that were in VRAM lately; the time depends on it,
        and no byte. Raises ``ManagedMemoryError``; the buffer's bytes are then undefined."""

    def acquire(self, buffer: int) -> None:
        """What the calling stream is given from now on comes after the buffer's last copy."""

    def release(self, buffer: int) -> None:
        """Copies from now on come after all that the calling stream has been given: it no longer reads the buffer then."""

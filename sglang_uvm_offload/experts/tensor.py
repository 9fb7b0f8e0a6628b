"""One tensor ``[E, ...]`` of a MoE layer in managed memory, each expert resident or offloaded."""

from __future__ import annotations

import numpy as np
import torch

from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, ManagedRange, Memory, Span


class ExpertTensor:
    """``num_experts`` experts of ``expert_bytes`` bytes in one managed range whose address never changes.

    The torch tensors over the range (``bytes``) keep it alive; it is freed with the last of them.
    """

    def __init__(self, memory: Memory, name: str, num_experts: int, expert_bytes: int):
        self.memory = memory
        self.layout = ExpertLayout(num_experts, expert_bytes)
        self.managed: ManagedRange = memory.allocate(self.layout.nbytes, name)

    @property
    def address(self) -> int:
        return self.managed.address

    def bytes(self) -> torch.Tensor:
        """The experts as ``uint8[num_experts * expert_bytes]``."""
        return self.memory.tensor(self.managed)

    def place(self, resident: np.ndarray) -> None:
        """Populate every page in its location by ``resident`` (``bool[num_experts]``). Call it before the first byte is
        written, so that offloaded bytes never pass through VRAM and resident ones never take host RAM."""
        pages = self.layout.resident_pages(resident)
        self._bring(~pages, Location.HOST)
        self._bring(pages, Location.DEVICE)

    def demote(self, before: np.ndarray, after: np.ndarray) -> int:
        """Move pages that are resident in ``before`` but not in ``after`` to host RAM. Returns the bytes requested to move."""
        pages = self.layout.resident_pages
        return self._bring(pages(before) & ~pages(after), Location.HOST)

    def promote(self, before: np.ndarray, after: np.ndarray) -> int:
        """Move pages that are resident in ``after`` but not in ``before`` to VRAM. Returns the bytes requested to move."""
        pages = self.layout.resident_pages
        return self._bring(pages(after) & ~pages(before), Location.DEVICE)

    def resident(self) -> np.ndarray:
        """``bool[num_experts]``: the experts whose pages were all last prefetched to VRAM, according to the driver."""
        whole = np.zeros(self.layout.num_experts, dtype=bool)
        for expert in range(self.layout.num_experts):
            only = np.zeros_like(whole)
            only[expert] = True
            spans = self.layout.spans(self.layout.resident_pages(only))
            whole[expert] = all(self.memory.last_prefetch(self.managed, s) is Location.DEVICE for s in spans)
        return whole

    def resident_bytes(self, resident: np.ndarray) -> int:
        """VRAM that the experts in ``resident`` take here, in whole pages."""
        return sum(span.nbytes for span in self.layout.spans(self.layout.resident_pages(resident)))

    def _bring(self, pages: np.ndarray, location: Location) -> int:
        spans: list[Span] = self.layout.spans(pages)
        if spans:
            self.memory.place(self.managed, spans, location)
        return sum(span.nbytes for span in spans)

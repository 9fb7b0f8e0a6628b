"""The VRAM of the states of linear attention, as SGLang 0.5.23 sizes their pool (``_handle_max_mamba_cache``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearState:
    """What a request keeps in layers with linear attention, in place of keys and values. Sizes are bytes."""

    layer_bytes: int
    """The state of one request in one layer, over all ranks that share the attention."""
    memory_ratio: float
    """``--mamba-full-memory-ratio``: the pool of states in terms of the KV cache. Without ``slots``."""
    slots: int | None = None
    """States of one rank, if flags set their number."""
    slots_per_request: int = 5
    """States that SGLang keeps for a running request: at most 5 (``_calculate_mamba_ratio``), 1 without a radix cache."""

    def bytes_beside(self, pool_bytes: int, slot_bytes: int, requests: int) -> int:
        """VRAM of one rank that must stay free next to a KV cache of ``pool_bytes``, so that SGLang gives it its bytes and
        ``requests`` have their states. ``slot_bytes`` is one state on this rank. The pool has one slot more, for padding."""
        if self.slots is not None:
            return (self.slots + 1) * slot_bytes
        states = max(int(self.memory_ratio * pool_bytes), (requests * self.slots_per_request + 1) * slot_bytes)
        # SGLang divides what is left by the ratio, so states in want of room enlarge the KV cache with them.
        return states + max(0, int(states / self.memory_ratio) - pool_bytes)

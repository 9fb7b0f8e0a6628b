"""How much host RAM a launch needs: the one sum that ``auto``, a given number of residents, ``plan`` and ``doctor`` all use."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.units import size

HICACHE_RESERVE_BYTES = 10 << 30
"""Host RAM that SGLang 0.5.23 leaves free beside hierarchical caches (``pool_host/base.py``)."""


@dataclass(frozen=True)
class HostNeed:
    """Bytes of host RAM for all ranks on a machine together. Callers that need a lower bound leave out uncertain terms rather
    than add up their own sum."""

    experts: int
    """Offloaded experts, including those of draft layers."""
    cache: int = 0
    """Hierarchical caches."""
    processes: int = 0
    tables: int = 0
    """Lookup tables."""
    tables_are_managed: bool = False
    """Whether the tables are in managed memory, like the experts."""

    @property
    def managed(self) -> int:
        """Bytes of managed memory in host RAM."""
        return self.experts + (self.tables if self.tables_are_managed else 0)

    @property
    def margin(self) -> int:
        """Bytes to leave free for other uses. A launch that would need part of them is refused."""
        return host_margin(self.managed)

    @property
    def beside_cache(self) -> int:
        return HICACHE_RESERVE_BYTES if self.cache else 0

    @property
    def total(self) -> int:
        return self.experts + self.margin + self.cache + self.beside_cache + self.processes + self.tables

    def beside_experts(self) -> str:
        """The other terms, as text for a message."""
        terms = {
            "hierarchical caches": self.cache,
            "what SGLang keeps free besides": self.beside_cache,
            "processes": self.processes,
            "lookup tables": self.tables,
            "other uses": self.margin,
        }
        return ", ".join(f"{size(nbytes)} for {name}" for name, nbytes in terms.items() if nbytes)

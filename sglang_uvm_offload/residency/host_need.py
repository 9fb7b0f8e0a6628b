"""What a launch needs of host RAM: the one sum by which ``auto``, a number of residents, ``plan`` and ``doctor`` judge it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.units import size

HICACHE_RESERVE_BYTES = 10 << 30
"""Host RAM that SGLang 0.5.23 keeps free next to hierarchical caches (``pool_host/base.py``)."""


@dataclass(frozen=True)
class HostNeed:
    """Bytes, of all ranks on this machine together. Whoever needs a lower bound leaves out what is uncertain, but adds nothing
    up elsewhere."""

    experts: int
    """Offloaded ones, of draft layers too."""
    cache: int = 0
    """Hierarchical caches."""
    processes: int = 0
    tables: int = 0
    """Lookup tables."""
    tables_are_managed: bool = False
    """Whether they are in managed memory, as the experts are."""

    @property
    def managed(self) -> int:
        """What offloading itself keeps there."""
        return self.experts + (self.tables if self.tables_are_managed else 0)

    @property
    def margin(self) -> int:
        """What offloading leaves free for others: it ends a launch that would take more of it."""
        return host_margin(self.managed)

    @property
    def beside_cache(self) -> int:
        return HICACHE_RESERVE_BYTES if self.cache else 0

    @property
    def total(self) -> int:
        return self.experts + self.margin + self.cache + self.beside_cache + self.processes + self.tables

    def beside_experts(self) -> str:
        """The other terms, for a message."""
        terms = {
            "hierarchical caches": self.cache,
            "what SGLang keeps free besides": self.beside_cache,
            "processes": self.processes,
            "lookup tables": self.tables,
            "other uses": self.margin,
        }
        return ", ".join(f"{size(nbytes)} for {name}" for name, nbytes in terms.items() if nbytes)

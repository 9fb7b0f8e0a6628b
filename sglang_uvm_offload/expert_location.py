"""Which expert of the checkpoint lies at which place of a layer.

SGLang calls the places *physical* experts and the checkpoint's experts *logical* ones. A place computes, is counted and is
moved; ids in flags, files and statistics are the checkpoint's. The two differ with ``--init-expert-location``; with
``--ep-num-redundant-experts`` some experts have replicas, and ``--enable-eplb`` rearranges them all while it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ExpertLocation:
    """The routed experts of one MoE layer. ``experts``: int64, the checkpoint's id of the expert at each place, over all ranks
    that share the layer. ``places``: those of this rank, in local order."""

    experts: np.ndarray
    places: range

    @classmethod
    def trivial(cls, num_experts: int, places: range) -> ExpertLocation:
        """Each expert at the place of its own number."""
        return cls(np.arange(num_experts), places)

    @property
    def is_trivial(self) -> bool:
        return bool((self.experts == np.arange(self.experts.size)).all())

    @property
    def num_experts(self) -> int:
        """The layer's experts in the checkpoint."""
        return int(self.experts.max(initial=-1)) + 1

    @property
    def ids(self) -> np.ndarray:
        """int64: the checkpoint's id of the expert at each place of this rank."""
        return self.experts[self.places.start : self.places.stop]

    @property
    def replicas(self) -> np.ndarray:
        """int64: at how many places of all ranks the expert of each of ``ids`` lies."""
        return np.bincount(self.experts)[self.ids]


def by_expert(counts: np.ndarray, locations: Sequence[ExpertLocation], num_experts: int) -> np.ndarray:
    """``[layers, ..., num_experts]``: the counts of one rank's places, ``[layers, ..., width]``, added up by the checkpoint's
    expert. What lies behind the routed places (fused shared experts) is left out."""
    out = np.zeros((*counts.shape[:-1], num_experts), dtype=np.int64)
    for total, local, where in zip(out, counts, locations, strict=True):
        np.add.at(np.moveaxis(total, -1, 0), where.ids, np.moveaxis(local[..., : len(where.places)], -1, 0))
    return out


def by_place(counts: np.ndarray, locations: Sequence[ExpertLocation], width: int) -> np.ndarray:
    """``[layers, ..., width]``: the counts of the checkpoint's experts, ``[layers, ..., num_experts]``, at the places of one
    rank. SGLang spreads tokens evenly over the replicas of an expert, so each has an equal part."""
    out = np.zeros((*counts.shape[:-1], width), dtype=np.int64)
    for local, total, where in zip(out, counts, locations, strict=True):
        local[..., : len(where.places)] = total[..., where.ids] // where.replicas
    return out

"""Maps the places of a layer to the checkpoint's experts.

SGLang calls places *physical* experts and the checkpoint's experts *logical* ones. Computing, counting and moving happen per
place. Ids in flags, files and statistics are the checkpoint's. The two differ with ``--init-expert-location``. With
``--ep-num-redundant-experts`` some experts have replicas, and ``--enable-eplb`` rearranges experts while serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ExpertLocation:
    """The routed experts of one MoE layer. ``experts`` (int64) is the checkpoint's id of the expert at each place, over all
    ranks that share the layer. ``places`` are this rank's, in local order."""

    experts: np.ndarray
    places: range

    @classmethod
    def trivial(cls, num_experts: int, places: range) -> ExpertLocation:
        """The identity map: each expert at the place of its own id."""
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
        """int64: the number of places, over all ranks, of each expert in ``ids``."""
        return np.bincount(self.experts)[self.ids]


def by_expert(counts: np.ndarray, locations: Sequence[ExpertLocation], num_experts: int) -> np.ndarray:
    """``[layers, ..., num_experts]``: one rank's counts per place, ``[layers, ..., width]``, summed per checkpoint expert.
    Columns after the routed places (fused shared experts) are dropped."""
    out = np.zeros((*counts.shape[:-1], num_experts), dtype=np.int64)
    for total, local, where in zip(out, counts, locations, strict=True):
        np.add.at(np.moveaxis(total, -1, 0), where.ids, np.moveaxis(local[..., : len(where.places)], -1, 0))
    return out


def by_place(counts: np.ndarray, locations: Sequence[ExpertLocation], width: int) -> np.ndarray:
    """``[layers, ..., width]``: counts per checkpoint expert, ``[layers, ..., num_experts]``, mapped to one rank's places. The
    replicas of an expert share its count equally, because SGLang spreads tokens evenly over them."""
    out = np.zeros((*counts.shape[:-1], width), dtype=np.int64)
    for local, total, where in zip(out, counts, locations, strict=True):
        local[..., : len(where.places)] = total[..., where.ids] // where.replicas
    return out

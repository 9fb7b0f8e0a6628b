"""Extents, the units of residency: runs of memory blocks that hold parts of the same experts. Pure: arrays only.

An extent serves each step that activates an expert in it. So its value is its experts' activations, weighted by the bytes of
each, and its cost is the VRAM that it takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Extents:
    """The extents of all layers of a model on one rank. ``layer`` and ``nbytes`` are int64 ``[extents]``, in layer order.

    A *part* is the bytes of one expert in one extent; ``part_*`` are int64 ``[parts]``, in extent order. Experts are numbered
    across all layers: ``layer * width + expert``, where ``shape`` is (layers, width).
    """

    shape: tuple[int, int]
    layer: np.ndarray
    nbytes: np.ndarray
    part_extent: np.ndarray
    part_expert: np.ndarray
    part_bytes: np.ndarray
    _first_part: np.ndarray = field(init=False, repr=False)
    _weight: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_first_part", np.searchsorted(self.part_extent, np.arange(len(self.layer))))
        object.__setattr__(self, "_weight", (self.part_bytes / self.nbytes[self.part_extent]).astype(np.float32))

    def __len__(self) -> int:
        return len(self.layer)

    @property
    def first_expert(self) -> np.ndarray:
        """int64 ``[extents]``: each extent's first expert."""
        return self.part_expert[self._first_part]

    def density(self, activations: np.ndarray) -> np.ndarray:
        """float ``[extents]``: the activations (``[layers, width]``) that each extent serves, each weighted by its expert's
        share of the extent's bytes. An extent that one expert fills serves all of that expert's activations."""
        if not len(self):
            return np.zeros(0, dtype=np.float32)
        return np.add.reduceat(activations.ravel()[self.part_expert] * self._weight, self._first_part)

    def holding(self, experts: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the extents that hold any byte of ``experts`` (``bool[layers, width]``)."""
        held = np.zeros(len(self), dtype=bool)
        held[self.part_extent[experts.ravel()[self.part_expert]]] = True
        return held

    def bytes_by_expert(self, extents: np.ndarray) -> np.ndarray:
        """``int64[layers, width]``: each expert's bytes in ``extents`` (``bool[extents]``)."""
        inside = extents[self.part_extent]
        found = np.bincount(self.part_expert[inside], self.part_bytes[inside], minlength=self.shape[0] * self.shape[1])
        return found.astype(np.int64).reshape(self.shape)

    def bytes_by_layer(self, extents: np.ndarray) -> np.ndarray:
        """``int64[layers]``: the bytes of VRAM that ``extents`` (``bool[extents]``) take in each layer."""
        return np.bincount(self.layer[extents], self.nbytes[extents], minlength=self.shape[0]).astype(np.int64)

    def total(self, extents: np.ndarray) -> int:
        """The bytes of VRAM that ``extents`` (``bool[extents]``) take."""
        return int(self.nbytes[extents].sum())


@dataclass(frozen=True)
class Budget:
    """The VRAM for all layers' ``movable`` extents (``bool[extents]``): ``nbytes`` bytes, of which each layer uses at least its
    ``floor`` (int64 ``[layers]``)."""

    extents: Extents
    movable: np.ndarray
    nbytes: int
    floor: np.ndarray

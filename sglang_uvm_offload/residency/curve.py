"""The hit rates that more or fewer residents would have reached."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from sglang_uvm_offload.residency.bounds import Count, Listed, Share

Residents = Annotated[int, Meta(ge=0, le=1 << 15)]


class Curve(Struct, frozen=True):
    """The hit rate over ``activations`` (in decode steps, of experts that can be offloaded) that the best fixed residents would
    have reached: n of each layer (``uniform``), or as many bytes over all layers (``pooled``), for n in ``residents``; and the
    one that the ``present`` residents would have reached. The best are chosen from the activations that they are measured
    on, so these are upper bounds.
    """

    decode_steps: Count
    activations: Annotated[int, Meta(ge=1, le=1 << 60)]
    present: Share
    residents: Annotated[list[Residents], Meta(min_length=2), Listed]
    uniform: Annotated[list[Share], Listed]
    pooled: Annotated[list[Share], Listed] = msgspec.field(name="global")

    def check(self) -> None:
        """Raise ``ValueError`` for points that form no curve."""
        if not len(self.residents) == len(self.uniform) == len(self.pooled):
            raise ValueError("residents, uniform and global must be equally long")
        if any(later <= earlier for earlier, later in pairwise(self.residents)):
            raise ValueError("residents must rise")

    def at(self, residents: float, pooled: bool) -> float:
        """The best hit rate at this many residents a layer, interpolated linearly."""
        return float(np.interp(residents, self.residents, self.pooled if pooled else self.uniform))


def combined(curves: Sequence[Curve]) -> Curve | None:
    """The mean of several ranks' curves, weighted by activations; n counts on each rank. None without curves."""
    if not curves:
        return None
    total = sum(curve.activations for curve in curves)
    grid = sorted({n for curve in curves for n in curve.residents})

    def mean(pooled: bool) -> list[float]:
        return [min(1.0, sum(curve.activations / total * curve.at(n, pooled) for curve in curves)) for n in grid]

    return Curve(
        decode_steps=max(curve.decode_steps for curve in curves),
        activations=total,
        present=min(1.0, sum(curve.activations / total * curve.present for curve in curves)),
        residents=grid,
        uniform=mean(False),
        pooled=mean(True),
    )

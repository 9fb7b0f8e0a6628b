"""Maps a measured trace to a model with other numbers of layers and experts.

A model with G times the trace's experts has them in G groups, and each group follows one measured layer: group g of layer l
follows measured layer ``l * G + g``, wrapping around to the first. A token's experts are spread over the groups as evenly as
possible. A group that takes fewer experts than the trace names draws them at random for each token and keeps their order. (The
first ones would be a biased sample: ordered by weight, they are more concentrated than the rest; some traces are ordered by
id.)

So each group has the measured frequencies, and neighbouring tokens overlap more than chance by the measured factor. It is an
assumption that a token chooses from all groups independently and equally often. If the trace and the model agree in experts and
in top-k, routing is the trace's own.
"""

from __future__ import annotations

import numpy as np


class OverlayError(ValueError):
    """The trace does not fit the model. The message gives the reason."""


def lay_over(ids: np.ndarray, trace_experts: int, layers: int, experts: int, top_k: int) -> np.ndarray:
    """Maps ``ids[..., measured layer, k]`` of a trace with ``trace_experts`` per layer to int32 ``[..., layers, top_k]`` for a
    model with ``experts`` per layer. Raises ``OverlayError`` if the rule above does not apply."""
    measured_layers, measured_k = ids.shape[-2:]
    groups = experts // trace_experts
    if groups * trace_experts != experts or groups == 0:
        raise OverlayError(f"the model's {experts} experts are not a multiple of the trace's {trace_experts}")
    if not groups <= top_k <= groups * measured_k:
        raise OverlayError(
            f"{top_k} experts a token cannot be taken from {groups} groups of {trace_experts}: the trace names {measured_k} a "
            f"token, so {groups}..{groups * measured_k} can"
        )
    lots = np.random.default_rng(0)
    laid = np.empty((*ids.shape[:-2], layers, top_k), dtype=np.int32)
    for layer in range(layers):
        filled = 0
        for group in range(groups):
            picks = top_k // groups + (group < top_k % groups)
            source = ids[..., (layer * groups + group) % measured_layers, :]
            laid[..., layer, filled : filled + picks] = drawn(source, picks, lots) + np.int32(group * trace_experts)
            filled += picks
    return laid


def drawn(ids: np.ndarray, picks: int, lots: np.random.Generator) -> np.ndarray:
    """Draws ``picks`` entries of the last dimension uniformly and keeps their order."""
    if picks == ids.shape[-1]:
        return ids
    chosen = np.sort(lots.random(ids.shape).argsort(axis=-1)[..., :picks], axis=-1)
    return np.take_along_axis(ids, chosen, axis=-1)

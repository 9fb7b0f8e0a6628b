"""A measured trace laid over a model with other numbers of layers and experts.

A model with G times the trace's experts gets them in G groups, and each group follows one measured layer: group g of layer l
follows measured layer ``l * G + g``, and where the measured layers run out they are used again from the first. A token's
experts are spread over the groups as evenly as they can be. A group that takes fewer than the trace names draws them by lot,
anew for each token, and keeps their order. (The ones named first are no fair sample: where they are ordered by weight they
are more concentrated than the rest, and some traces are ordered by id.)

So each group has the measured frequencies, and the overlap of neighbouring tokens exceeds that of chance by the measured
factor. That groups are chosen from independently, and in equal shares, are assumptions. Where the numbers of experts and of
experts a token agree, routing is the trace's own.
"""

from __future__ import annotations

import numpy as np


class OverlayError(ValueError):
    """The trace cannot be laid over the model; the message has the reason."""


def lay_over(ids: np.ndarray, trace_experts: int, layers: int, experts: int, top_k: int) -> np.ndarray:
    """``ids[..., measured layer, k]`` of a trace with ``trace_experts`` a layer, as int32 ``[..., layers, top_k]`` for a model
    with ``experts`` a layer. Raises ``OverlayError`` where that cannot be done by the rule above."""
    measured_layers, measured_k = ids.shape[-2:]
    groups = experts // trace_experts
    if groups * trace_experts != experts or groups == 0:
        raise OverlayError(f"the model's {experts} experts are no multiple of the trace's {trace_experts}")
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
    """``picks`` of the last dimension, in their order, each as likely as the others."""
    if picks == ids.shape[-1]:
        return ids
    chosen = np.sort(lots.random(ids.shape).argsort(axis=-1)[..., :picks], axis=-1)
    return np.take_along_axis(ids, chosen, axis=-1)

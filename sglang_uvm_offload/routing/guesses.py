"""Guesses in a routing trace: the experts that a layer's router would choose from the input of an earlier layer's router.

A trace file holds ``guesses[token, layer, distance - 1, rank]`` (integers, likeliest first; -1: no guess), each made from the
router input ``distance`` MoE layers before ``layer``, and ``guesses_folded[layer, distance - 1]`` (bool): whether that input
was scaled by the ratio of the two layers' norms. Like the rest of the trace, they are untrusted input.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ARRAYS = ("guesses", "guesses_folded")
MAX_DISTANCES = 8


class GuessesError(ValueError):
    """The arrays are not valid guesses for the trace. The message gives the reason."""


@dataclass(frozen=True, eq=False)
class Guesses:
    """``experts`` int16 ``[tokens, layers, distances, guesses]``, ``folded`` bool ``[layers, distances]``."""

    experts: np.ndarray
    folded: np.ndarray

    def checked(self, tokens: int, layers: int, num_experts: int) -> Guesses:
        """Return the guesses as int16, checked against the shape of their trace. Raises ``GuessesError``."""
        experts, folded = self.experts, self.folded
        if experts.ndim != 4 or not np.issubdtype(experts.dtype, np.integer):
            raise GuessesError(f"guesses must be integers [token, layer, distance, rank], not {_kind(experts)}")
        if experts.shape[:2] != (tokens, layers):
            raise GuessesError(f"guesses must be of {tokens} tokens and {layers} layers as ids, not {list(experts.shape)}")
        if not 1 <= experts.shape[2] <= MAX_DISTANCES or not 1 <= experts.shape[3] <= num_experts:
            limits = f"1..{MAX_DISTANCES} distances and 1..{num_experts} experts"
            raise GuessesError(f"guesses must be of {limits}, not {list(experts.shape)}")
        if experts.size and (int(experts.min()) < -1 or int(experts.max()) >= num_experts):
            raise GuessesError(f"guesses must be -1..{num_experts - 1}, and are {experts.min()}..{experts.max()}")
        if folded.dtype != bool or folded.shape != experts.shape[1:3]:
            raise GuessesError(f"guesses_folded must be bool {list(experts.shape[1:3])}, not {_kind(folded)}")
        return Guesses(experts.astype(np.int16, copy=False), folded)


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"

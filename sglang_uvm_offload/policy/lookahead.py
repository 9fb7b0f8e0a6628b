"""Chooses the experts to copy ahead of a layer's own routing. The kernels in ``kernels/uvm_ops.cu`` follow this rule."""

from __future__ import annotations

import numpy as np


def likeliest(guesses: np.ndarray, missed: np.ndarray, most: int) -> list[int]:
    """The first ``most`` guessed experts that are ``missed`` (``bool[experts]``). ``guesses`` is int ``[rows, n]``, with each
    row's likeliest expert first; the result takes all rows' first guesses, then their second ones, and so on. Numbers that
    name no expert do not count."""
    in_order = guesses.T.ravel()
    known = in_order[(in_order >= 0) & (in_order < len(missed))]
    return list(dict.fromkeys(known[missed[known]].tolist()))[:most]

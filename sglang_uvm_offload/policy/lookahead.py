"""Which experts of a layer come ahead of its own routing. The kernels in ``kernels/uvm_ops.cu`` follow this."""

from __future__ import annotations

import numpy as np


def likeliest(guesses: np.ndarray, missed: np.ndarray, most: int) -> list[int]:
    """The first ``most`` experts that would be missed, in the order of ``guesses``: int ``[rows, n]``, the likeliest of each
    row first, and so of all rows; numbers that are no expert's do not count. ``missed``: ``bool[experts]``."""
    in_order = guesses.T.ravel()
    known = in_order[(in_order >= 0) & (in_order < len(missed))]
    return list(dict.fromkeys(known[missed[known]].tolist()))[:most]

"""Orders in which a layer's experts may lie in memory, made from the traffic that they served. Pure.

An order is int ``[layers, experts]``: the expert at each place. The traffic is ``bool[steps, layers, experts]``: the experts
that each step uses.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

TIER = 8
"""Experts about as hot, among which use in common decides who are neighbours."""
WINDOW = 16
"""Steps over which use in common is looked for: within one step alone two experts of one topic rarely meet."""

ANY_BYTE, CHECKPOINT, HOTTEST, CO_USE = "any byte", "checkpoint", "hottest first", "co-use"


def as_is(activated: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.arange(activated.shape[2]), activated.shape[1:])


def hottest_first(activated: np.ndarray) -> np.ndarray:
    """By the steps that use an expert, most first. Ties keep the checkpoint's order."""
    return np.argsort(-activated.sum(axis=0), axis=1, kind="stable")


def by_co_use(activated: np.ndarray) -> np.ndarray:
    """Hottest first in tiers of ``TIER`` experts. Within a tier each expert is followed by the one whose use over windows of
    ``WINDOW`` steps is correlated most with its own, so that experts which become hot together share blocks."""
    ends = np.arange(WINDOW, len(activated) + 1, WINDOW)
    use = np.diff(np.cumsum(activated, axis=0, dtype=np.float64)[ends - 1], axis=0, prepend=0.0)
    return np.stack([_chained(row, use[:, layer]) for layer, row in enumerate(hottest_first(activated))])


def _chained(row: np.ndarray, use: np.ndarray) -> np.ndarray:
    """``row``: a layer's experts, the hottest first. ``use`` float ``[windows, experts]``."""
    apart = use - use.mean(axis=0)
    apart /= np.maximum(np.linalg.norm(apart, axis=0), 1e-9)
    alike = apart.T @ apart
    chain = [int(row[0])]
    for begin in range(0, row.size, TIER):
        left = [int(each) for each in row[begin : begin + TIER] if each != row[0]]
        while left:
            chain.append(left.pop(int(np.argmax(alike[chain[-1], left]))))
    return np.array(chain)


ORDERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    ANY_BYTE: as_is,
    CHECKPOINT: as_is,
    HOTTEST: hottest_first,
    CO_USE: by_co_use,
}


def laid_out(by_expert: np.ndarray, order: np.ndarray) -> np.ndarray:
    """What is counted by expert, ``[..., layers, experts]``, by place."""
    return by_expert[..., np.arange(len(order))[:, None], order]

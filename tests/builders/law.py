"""Generates routing with a given locality, for models without public traces: an LRU stack model.

Each layer keeps its experts in order of last use. A token draws each expert by its place in that order, so that a cache of the
n most recently used experts hits as often as the law says (less by a few points, because a token uses no expert twice). A share
``skew`` of draws comes from a list of favourites with Zipf-like popularity instead. Each domain of the traffic has its own list
in each layer, and requests take turns among domains. The order persists across requests.

``POINTS`` are figures of Qwen3.8-Flash-Next (512 experts, 10 per token) from a mixed workload of 54,000 records (llama.cpp pull
request 27861): a cache of a layer's 64 most recently used experts would hit 67 %, one of 128 81 %, and a fixed list of the
hottest 32 covers 10 %. Other models use the same shares of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.routing.trace import Trace

POINTS = ((1 / 8, 0.67), (1 / 4, 0.81))
"""(share of experts, hit rate of a cache of that size)"""
LAST_TOKEN = 0.35
"""The share of a token's experts that the previous token used (assumed)."""


@dataclass(frozen=True)
class Law:
    experts: int
    top_k: int
    skew: float = 0.0
    domains: int = 1

    def places(self) -> np.ndarray:
        """Returns ``float[experts]``: the probability of each place in the order. Between points the cumulative share grows
        with the logarithm of the place."""
        known = [(0.0, 0.0), (self.top_k, LAST_TOKEN), *((share * self.experts, hits) for share, hits in POINTS)]
        ends, hits = np.array([*known, (self.experts, 1.0)]).T
        within = np.interp(np.log1p(np.arange(self.experts + 1)), np.log1p(ends), hits)
        return np.diff(within)

    def favourites(self) -> np.ndarray:
        """Returns ``float[experts]``: the probability of each place in a list of favourites."""
        popularity = 1 / np.arange(1, self.experts + 1)
        return popularity / popularity.sum()

    def trace(self, layers: int, requests: int, tokens: int, seed: int) -> Trace:
        """Generates ``requests`` requests of ``tokens`` tokens each."""
        rng = np.random.default_rng(seed)
        ids = np.stack([self._layer(rng, requests, tokens) for _ in range(layers)], axis=1)
        return Trace(ids, np.full(requests, tokens), self.experts)

    def _layer(self, rng: np.random.Generator, requests: int, tokens: int) -> np.ndarray:
        """Returns ``int16[tokens of all requests, top_k]``."""
        favourites = [rng.permutation(self.experts) for _ in range(self.domains)]
        places, popularity = np.cumsum(self.places()), np.cumsum(self.favourites())
        order = rng.permutation(self.experts)
        out = np.empty((requests * tokens, self.top_k), dtype=np.int16)
        for token in range(len(out)):
            favourite = favourites[token // tokens % self.domains]
            chosen: dict[int, None] = {}
            while len(chosen) < self.top_k:
                which, at = rng.random((2, 4 * self.top_k))
                drawn = np.where(which < self.skew, favourite[_draw(popularity, at)], order[_draw(places, at)])
                chosen |= dict.fromkeys(drawn.tolist())
            used = np.array(list(chosen)[: self.top_k])
            out[token] = used
            rest = np.ones(self.experts, dtype=bool)
            rest[used] = False
            order = np.concatenate([used, order[rest[order]]])
        return out


def _draw(cumulated: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.minimum(np.searchsorted(cumulated, at, side="right"), len(cumulated) - 1)

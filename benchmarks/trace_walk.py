"""The walk through a measured trace that a checkpoint of ``trace_checkpoint.py`` replays: positions, tokens and prompts.

A walk is a trace whose tokens are the checkpoint's *positions*. Position p routes to ``routing.ids[p]`` in each MoE layer and
is followed by p + 1; the first position follows the last. Every position has ``ALIASES`` tokens that route alike. At p the
model generates one of the tokens of p + 1; what the experts compute decides which.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sglang_uvm_offload.routing.trace import Trace, TraceError

FILE = "walk.npz"
ALIASES = 4
TEXT_TOKENS = 320
"""Byte-level tokens, which precede the positions' tokens in the vocabulary. Each routes like some position."""
STRETCH = 128


class WalkError(ValueError):
    """The trace cannot be walked. The message gives the reason."""


@dataclass(frozen=True, eq=False)
class Walk:
    """``routing`` has one token per position, and one request per stretch that was cut from a measured request."""

    routing: Trace

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Walk:
        """Loads the walk of the checkpoint in ``folder``."""
        return cls(Trace.load(Path(folder) / FILE))

    @property
    def positions(self) -> int:
        return len(self.routing.ids)

    @property
    def starts(self) -> np.ndarray:
        """The first position of each stretch, ``int64[stretches]``."""
        return np.cumsum(self.routing.seq_len) - self.routing.seq_len

    @property
    def vocabulary(self) -> int:
        """Tokens in the vocabulary, rounded up to a size that every kernel accepts."""
        return -(-(TEXT_TOKENS + self.positions * ALIASES) // 64) * 64

    def tokens(self, positions: np.ndarray, aliases: np.ndarray) -> np.ndarray:
        return TEXT_TOKENS + positions % self.positions * ALIASES + aliases

    def position_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the position of each token. Byte-level tokens have one too."""
        position = (tokens - TEXT_TOKENS) // ALIASES
        return np.where(tokens < TEXT_TOKENS, tokens, position) % self.positions

    def experts_of(self, tokens: np.ndarray) -> np.ndarray:
        """Returns ``ids[token, layer, k]``: the experts that these tokens route to."""
        return self.routing.ids[self.position_of(tokens)]

    def prompt_ids(self, request: int, length: int) -> list[int]:
        """Returns a prompt of ``length`` tokens whose answer walks stretch ``request`` from its first position.

        The prompt walks the positions before that. Requests beyond the number of stretches start later in one of them. No two
        requests begin with the same tokens."""
        if length < 1:
            raise WalkError(f"a prompt must have at least 1 token, not {length}")
        stretch, again = request % len(self.starts), request // len(self.starts)
        start = int(self.starts[stretch]) + again * 61
        aliases = np.random.default_rng(request).integers(0, ALIASES, length)
        return self.tokens(np.arange(start - length, start), aliases).tolist()

    def texts(self) -> list[str]:
        """Returns the text of each position's tokens, by token id."""
        return [f"<{position}{letter}>" for position in range(self.positions) for letter in "abcd"[:ALIASES]]

    def save(self, folder: str | os.PathLike[str]) -> None:
        self.routing.save(Path(folder) / FILE)


def cut(trace: Trace, positions: int, stretch: int = STRETCH) -> Trace:
    """Cuts ``positions`` tokens from a trace, in stretches of at most ``stretch`` from the beginning of a request each.

    Requests come in a random but fixed order, so that a few of many are a fair sample. Raises ``WalkError`` if the trace has
    too few such tokens, or tokens that a model cannot route as recorded."""
    if positions < 2 or stretch < 1:
        raise WalkError(f"a walk needs at least 2 positions in stretches of at least 1, not {positions} of {stretch}")
    begins = np.cumsum(trace.seq_len) - trace.seq_len
    tokens: list[np.ndarray] = []
    left = positions
    for request in np.random.default_rng(0).permutation(trace.num_requests):
        length = min(int(trace.seq_len[request]), stretch, left)
        if length:
            tokens.append(np.arange(length) + begins[request])
            left -= length
    if left:
        raise WalkError(
            f"{positions} positions are more than the {positions - left} tokens of the trace's {trace.num_requests} requests, "
            f"{stretch} of each at most"
        )
    ids = trace.ids[np.concatenate(tokens)]
    check_routable(ids)
    return Trace(ids, np.array([len(part) for part in tokens]), trace.num_experts)


def check_routable(ids: np.ndarray) -> None:
    """Raises ``WalkError`` unless every token has k different experts, as a router picks them."""
    ordered = np.sort(ids, axis=-1)
    absent = (ids < 0).any(axis=(1, 2))
    double = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2)) & ~absent
    if absent.any() or double.any():
        raise WalkError(
            f"a router picks {ids.shape[-1]} different experts for each token; of {len(ids)} tokens of the trace, "
            f"{absent.sum()} have fewer and {double.sum()} name one twice"
        )


def available(trace: Trace, stretch: int = STRETCH) -> int:
    """Returns how many positions ``cut`` can take."""
    return int(np.minimum(trace.seq_len, stretch).sum())


def read(path: str | os.PathLike[str]) -> Trace:
    """Loads a trace. Raises ``WalkError`` with the file's name if it holds none."""
    try:
        return Trace.load(path)
    except (TraceError, OSError) as problem:
        raise WalkError(f"{path}: {problem}") from problem

"""The memory pools of one launch as SGLang's own configurators size them: KV cache, states of linear attention, and drafts'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_uvm_offload.sizing.inputs import Parallel

Point = tuple[int, int]
"""Tokens of KV cache, and the bytes of one rank with which SGLang makes so many, and serves the requests that are asked for."""


@dataclass(frozen=True)
class ServerPools:
    """Measured for the ranks of one launch, at a few numbers of tokens; pools grow linearly between them."""

    parallel: Parallel
    stages: tuple[tuple[Point, ...], ...]
    """For each pipeline stage two points or more, by ascending tokens."""

    def nbytes(self, stage: int, tokens: int) -> int:
        """Bytes of one rank for ``tokens``, rounded up."""
        points = self.stages[stage]
        (low, fewer), (high, more) = _around(points, tokens)
        return max(0, fewer + -(-(tokens - low) * (more - fewer) // (high - low)))

    def token_bytes(self, stage: int) -> float:
        """Bytes of one rank for each further token."""
        (low, fewer), (high, more) = self.stages[stage][-2:]
        return (more - fewer) / (high - low)


def _around(points: Sequence[Point], tokens: int) -> tuple[Point, Point]:
    """The points that ``tokens`` lie between, or the nearest two."""
    above = next((place for place, (held, _) in enumerate(points) if held >= tokens), len(points) - 1)
    above = max(above, 1)
    return points[above - 1], points[above]

"""Damages files as a bad disk or a careless copy would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np


def flipped_bytes(path: Path, times: int = 300) -> Iterator[None]:
    """Yields ``times`` times, each time with a different byte of the file at ``path`` changed."""
    rng, whole = np.random.default_rng(0), path.read_bytes()
    for _ in range(times):
        broken = bytearray(whole)
        broken[rng.integers(len(whole))] ^= int(rng.integers(1, 256))
        path.write_bytes(broken)
        yield

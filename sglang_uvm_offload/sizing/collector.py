"""Python's collector of cycles, while many objects are made that have none."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collects no cycles meanwhile. Python looks for them again and again while objects grow in number, which takes much of the
    time of reading a checkpoint of hundreds of thousands of tensors."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

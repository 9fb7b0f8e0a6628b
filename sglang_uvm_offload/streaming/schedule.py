"""Which layer is in which stream buffer: the protocol alone, without any memory or device."""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the experts of ``row`` into ``buffer``, after all copies before."""

    row: int
    buffer: int


class BufferSchedule:
    """``count`` buffers that hold one layer (a *row* of the model's MoE layers) each. A step enters its rows in order, one
    after the other, but may skip some, enter one again, or end at any row.

    A buffer is never filled while it is read, and a row is staged one ahead of the row that is read: with two buffers while
    that one is read, with one buffer as soon as it is left.
    """

    def __init__(self, count: int):
        self.rows: list[int | None] = [None] * count
        """The row that each buffer holds or is being filled with, None for nothing of use."""
        self._readers = [0] * count

    def forget(self) -> None:
        """Nothing that the buffers hold is of use any more. Buffers that are read stay so until they are left."""
        self.rows = [None] * len(self.rows)

    def stage(self, row: int | None) -> list[Copy]:
        """Fill a free buffer with ``row`` (None: there is none), unless a buffer holds it already or all are read."""
        if row is None or row in self.rows:
            return []
        free = [buffer for buffer, readers in enumerate(self._readers) if not readers]
        if not free:
            return []
        buffer = min(free, key=lambda buffer: self.rows[buffer] is not None)
        self.rows[buffer] = row
        return [Copy(row, buffer)]

    def enter(self, row: int, following: int | None) -> tuple[int | None, list[Copy]]:
        """The buffer from which ``row`` is read until ``leave``, and what to copy before that, in order. The buffer is None
        where all are read already. ``following``: the row that is probably entered next."""
        copies = self.stage(row)
        if row not in self.rows:
            return None, copies
        buffer = self.rows.index(row)
        self._readers[buffer] += 1
        return buffer, copies + self.stage(following)

    def leave(self, buffer: int, following: int | None) -> list[Copy]:
        """The reader of ``buffer`` has ended; what to copy now."""
        self._readers[buffer] -= 1
        return self.stage(following)

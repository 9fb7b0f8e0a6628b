"""Schedules layers into stream buffers: pure logic without memory or a device."""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the experts of ``row`` into ``buffer``, after all earlier copies."""

    row: int
    buffer: int


class BufferSchedule:
    """``count`` buffers that each hold one layer (a *row* of the model's MoE layers). A step enters rows in order, but may skip
    rows, reenter one, or end at any row.

    A buffer is never filled while it is read. The next row is staged ahead: with two buffers while the current row is read,
    with one buffer as soon as the current row is left.
    """

    def __init__(self, count: int):
        self.rows: list[int | None] = [None] * count
        """The row that each buffer holds or is being filled with; None if its contents are useless."""
        self._readers = [0] * count

    def forget(self) -> None:
        """Discard the contents of all buffers. Buffers being read stay reserved until they are left."""
        self.rows = [None] * len(self.rows)

    def stage(self, row: int | None) -> list[Copy]:
        """Fill a free buffer with ``row``, unless it is None, already in a buffer, or all buffers are being read."""
        if row is None or row in self.rows:
            return []
        free = [buffer for buffer, readers in enumerate(self._readers) if not readers]
        if not free:
            return []
        buffer = min(free, key=lambda buffer: self.rows[buffer] is not None)
        self.rows[buffer] = row
        return [Copy(row, buffer)]

    def enter(self, row: int, following: int | None) -> tuple[int | None, list[Copy]]:
        """The buffer from which to read ``row`` until ``leave`` (None if all are being read), and the copies to make first, in
        order. ``following`` is the row that is probably entered next."""
        copies = self.stage(row)
        if row not in self.rows:
            return None, copies
        buffer = self.rows.index(row)
        self._readers[buffer] += 1
        return buffer, copies + self.stage(following)

    def leave(self, buffer: int, following: int | None) -> list[Copy]:
        """End a read of ``buffer``. Returns the copies to make now."""
        self._readers[buffer] -= 1
        return self.stage(following)

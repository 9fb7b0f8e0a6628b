"""Which layer is in which stream buffer: the protocol of the slots, without any memory or device."""

from __future__ import annotations

from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the experts of ``row`` into ``slot``, after all copies before."""

    row: int
    slot: int


class Slots:
    """``count`` slots that hold one layer (a *row* of the model's MoE layers) each. A step enters its rows in order, one after
    the other, but may skip some, enter one again, or end at any row.

    A slot is never filled while it is read, and a row is staged one ahead of the row that is read: with two slots while that
    one is read, with one slot as soon as it is left.
    """

    def __init__(self, count: int):
        self.rows: list[int | None] = [None] * count
        """The row that each slot holds or is being filled with, None for nothing of use."""
        self._readers = [0] * count

    def forget(self) -> None:
        """Nothing that the slots hold is of use any more. Slots that are read stay so until they are left."""
        self.rows = [None] * len(self.rows)

    def stage(self, row: int | None) -> list[Copy]:
        """Fill a free slot with ``row`` (None: there is none), unless a slot holds it already or all are read."""
        if row is None or row in self.rows:
            return []
        free = [slot for slot, readers in enumerate(self._readers) if not readers]
        if not free:
            return []
        slot = min(free, key=lambda slot: self.rows[slot] is not None)
        self.rows[slot] = row
        return [Copy(row, slot)]

    def enter(self, row: int, following: int | None) -> tuple[int | None, list[Copy]]:
        """The slot from which ``row`` is read until ``leave``, and what to copy before that, in order. The slot is None where
        all are read already. ``following``: the row that is probably entered next."""
        copies = self.stage(row)
        if row not in self.rows:
            return None, copies
        slot = self.rows.index(row)
        self._readers[slot] += 1
        return slot, copies + self.stage(following)

    def leave(self, slot: int, following: int | None) -> list[Copy]:
        """The reader of ``slot`` has ended; what to copy now."""
        self._readers[slot] -= 1
        return self.stage(following)

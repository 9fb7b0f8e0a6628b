"""The schedule of the stream buffers, with any order of rows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_uvm_offload.streaming.schedule import BufferSchedule, Copy

ROWS = 6


class Buffers:
    """What the buffers would hold: every copy is carried out, and must not hit a buffer that is read."""

    def __init__(self, count: int):
        self.schedule = BufferSchedule(count)
        self.held: list[int | None] = [None] * count
        self.read: list[list[int]] = [[] for _ in range(count)]
        self.copied: list[int] = []

    def carry_out(self, copies: list[Copy]) -> None:
        for row, buffer in copies:
            readers = self.read[buffer]
            assert not readers, f"row {row} is copied into buffer {buffer}, from which rows {readers} are read"
            self.held[buffer] = row
            self.copied.append(row)

    def enter(self, row: int, following: int | None) -> int | None:
        buffer, copies = self.schedule.enter(row, following)
        self.carry_out([copy for copy in copies if copy.row == row])
        if buffer is not None:
            assert self.held[buffer] == row, f"row {row} is read from buffer {buffer}, which holds row {self.held[buffer]}"
            self.read[buffer].append(row)
        self.carry_out([copy for copy in copies if copy.row != row])
        return buffer

    def leave(self, buffer: int, following: int | None) -> None:
        row = self.read[buffer].pop()
        assert self.held[buffer] == row
        self.carry_out(self.schedule.leave(buffer, following))


def after(row: int) -> int | None:
    return row + 1 if row + 1 < ROWS else None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.integers(0, ROWS - 1), st.none() | st.integers(0, ROWS - 1)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.none() | st.integers(0, ROWS - 1)),
        st.tuples(st.just("forget"), st.just(0), st.none()),
    ),
    max_size=40,
)


@given(st.integers(1, 3), ACTIONS)
def test_a_reader_always_has_its_own_row_until_it_leaves(count, actions):
    buffers, readers = Buffers(count), []
    for what, number, following in actions:
        if what == "enter":
            buffer = buffers.enter(number, following)
            readers += [] if buffer is None else [buffer]
            if buffer is None:
                assert len({*readers}) == count, "a row is turned away although a buffer is free"
        elif what == "leave" and readers:
            buffers.leave(readers.pop(number % len(readers)), following)
        elif what == "forget":
            buffers.schedule.forget()


@given(st.integers(1, 3), st.lists(st.sets(st.integers(0, ROWS - 1)), min_size=1, max_size=4))
def test_each_row_of_a_step_is_copied_once(count, steps):
    """Whatever rows a step has: the others have nothing to stream. Nothing is left of the step before."""
    buffers = Buffers(count)
    for step in steps:
        rows = sorted(step)
        following = dict(itertools.zip_longest(rows, rows[1:]))
        buffers.schedule.forget()
        buffers.copied.clear()
        buffers.carry_out(buffers.schedule.stage(rows[0] if rows else None))
        for row in rows:
            buffer = buffers.enter(row, following[row])
            assert buffer is not None
            buffers.leave(buffer, following[row])
        assert buffers.copied == rows


@pytest.mark.parametrize(("count", "while_read"), [(2, [0, 1]), (1, [0])])
def test_the_next_row_is_copied_while_one_is_read_or_with_one_buffer_as_soon_as_it_is_left(count, while_read):
    buffers = Buffers(count)
    buffer = buffers.enter(0, 1)
    assert buffer is not None
    assert buffers.copied == while_read
    buffers.leave(buffer, 1)
    assert buffers.copied == [0, 1]


def test_a_row_that_is_yet_to_be_read_is_not_overwritten_while_another_buffer_is_free():
    """A step that begins while the one before still reads has all buffers for itself once that is done."""
    buffers = Buffers(2)
    for row in (0, 1):
        assert buffers.enter(row, None) == row
    buffers.leave(0, None)
    buffers.schedule.forget()
    buffers.copied.clear()
    buffers.carry_out(buffers.schedule.stage(3))
    buffers.leave(1, 4)
    for row in (3, 4):
        assert buffers.enter(row, None) is not None
    assert buffers.copied == [3, 4]

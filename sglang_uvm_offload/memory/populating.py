"""Populates managed memory in host RAM on a thread of its own, while a model is built and its checkpoint read."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_uvm_offload.memory.layout import batches, whole_blocks
from sglang_uvm_offload.memory.protocol import ManagedRange, Span

Populate = Callable[[ManagedRange, Sequence[Span]], None]
"""Populates spans of a range, and returns when they are there."""


class _Piece(NamedTuple):
    """What one call populates: few bytes, because calls for other memory wait for it in the driver."""

    managed: ManagedRange
    owner: Callable[[], object | None]
    spans: list[Span]

    @property
    def nbytes(self) -> int:
        """Host RAM that it takes; 0 if its range is gone."""
        return 0 if self.owner() is None else sum(whole_blocks(span.nbytes) for span in self.spans)


class Populating:
    """A queue, and a thread that lives while something is in it: several threads populate more slowly than one (``probe``
    populate). It is a daemon, so no exit of the process waits for it."""

    def __init__(self, populate: Populate, begin: Callable[[], None] = lambda: None):
        """``begin`` prepares the thread."""
        self._populate = populate
        self._begin = begin
        self._process = os.getpid()
        self._changed = threading.Condition()
        """Guards what follows. Nothing that frees a range takes it, because a range may be freed on any thread."""
        self._queue: deque[_Piece] = deque()
        self._at_work: _Piece | None = None
        self._left: Counter[ManagedRange] = Counter()
        """Of each range, the pieces in the queue and at work."""
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def add(self, managed: ManagedRange, owner: Callable[[], object | None], spans: Sequence[Span]) -> None:
        """``owner``: a weak reference to what keeps the range. The thread keeps it for one piece at a time: a range that is
        freed is populated no further, as its address may be another one's by then. Raises as ``check`` does."""
        with self._changed:
            self.check()
            pieces = [_Piece(managed, owner, batch) for batch in batches(spans)]
            self._queue.extend(pieces)
            self._left[managed] += len(pieces)
            if self._thread is None and self._queue:
                thread = threading.Thread(target=self._run, name="populate host pages", daemon=True)
                thread.start()
                self._thread = thread

    def check(self) -> None:
        """Raise the failure that ended the thread, if one did."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Until nothing is left to populate. Raises as ``check`` does."""
        if not self._inherited():
            with self._changed:
                self._changed.wait_for(lambda: self._thread is None)
        self.check()

    def wait_for(self, managed: ManagedRange) -> None:
        """Until nothing of this range is left, which comes next. Raises as ``check`` does."""
        if not self._inherited() and self._left[managed]:
            with self._changed:
                self._queue = deque(sorted(self._queue, key=lambda piece: piece.managed is not managed))
                self._changed.wait_for(lambda: not self._left[managed])
        self.check()

    def drop(self) -> None:
        """Forget the queue. The thread ends with its piece; this does not wait for it."""
        if not self._inherited():
            with self._changed:
                self._forget()

    def _forget(self) -> None:
        self._queue.clear()
        self._left = Counter() if self._at_work is None else Counter([self._at_work.managed])

    @property
    def nbytes(self) -> int:
        """Host RAM that is still to be taken, at most: whoever writes first takes it first."""
        with self._changed:
            pieces = [*self._queue] if self._at_work is None else [self._at_work, *self._queue]
        return sum(piece.nbytes for piece in pieces)

    def _inherited(self) -> bool:
        """Whether this is a forked child, which has no such thread, and perhaps a lock that nobody gives back."""
        return os.getpid() != self._process

    def _run(self) -> None:
        try:
            self._begin()
            while (piece := self._next()) is not None:
                self._work_on(piece)
        except Exception as failure:  # noqa: BLE001 -- whoever waits raises it
            with self._changed:
                self._failure = failure
                self._forget()
                self._next()

    def _work_on(self, piece: _Piece) -> None:
        owner = piece.owner()
        try:
            if owner is not None:
                self._populate(piece.managed, piece.spans)
        finally:
            del owner  # before anyone is told: then the range is as free as its tensors have it, also after a failure

    def _next(self) -> _Piece | None:
        """None: nothing is left, and the thread ends."""
        with self._changed:
            if self._at_work is not None:
                self._left[self._at_work.managed] -= 1
            self._at_work = self._queue.popleft() if self._queue else None
            if self._at_work is None:
                self._thread = None
            self._changed.notify_all()
            return self._at_work

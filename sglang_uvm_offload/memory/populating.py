"""Populates managed memory in host RAM on a background thread, while a model is built and its checkpoint is read."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_uvm_offload.memory.layout import batches, whole_blocks
from sglang_uvm_offload.memory.protocol import ManagedRange, Span

Populate = Callable[[ManagedRange, Sequence[Span]], None]
"""Populates spans of a range and returns when they are in memory."""


@dataclass
class _Left:
    """The rest of a range that is still to be populated."""

    managed: ManagedRange
    owner: Callable[[], object | None]
    pieces: deque[list[Span]] = field(default_factory=deque)
    """One call populates one piece. Pieces are small, because driver calls for other memory wait for them."""
    nbytes: int = 0
    """The bytes of all pieces, including the current one."""


class Populating:
    """A queue and a thread that runs while the queue is not empty. There is one thread because several prefetching threads
    populate more slowly (benchmarks/results/2026-11-27-nvidia-h200-2/probe.log). It is a daemon, so process exit does not wait
    for it."""

    def __init__(self, populate: Populate, begin: Callable[[], None] = lambda: None):
        """``begin`` prepares the thread."""
        self._populate = populate
        self._begin = begin
        self._process = os.getpid()
        self._changed = threading.Condition()
        """Guards the fields below. Code that frees a range must not take it, because a range may be freed on any thread."""
        self._queue: dict[ManagedRange, _Left] = {}
        """The ranges in order of their turn, including the one being populated."""
        self._at_work: tuple[_Left, list[Span]] | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def add(self, managed: ManagedRange, owner: Callable[[], object | None], spans: Sequence[Span]) -> None:
        """Queue ``spans`` of a range. ``owner`` is a weak reference to whatever keeps the range alive, which the thread holds
        for one piece at a time. A freed range is not populated further, because its address may have been reused. Raises like
        ``check``."""
        with self._changed:
            self.check()
            if not spans:
                return
            left = self._queue.setdefault(managed, _Left(managed, owner))
            left.pieces.extend(batches(spans))
            left.nbytes += _taken_by(spans)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="populate host pages", daemon=True)
                thread.start()
                self._thread = thread

    def check(self) -> None:
        """Raise the failure that ended the thread, if any."""
        if self._failure is not None:
            raise self._failure

    def wait(self) -> None:
        """Wait until the queue is empty. Raises like ``check``."""
        if not self._inherited():
            with self._changed:
                self._changed.wait_for(lambda: self._thread is None)
        self.check()

    def wait_for(self, managed: ManagedRange) -> None:
        """Populate this range next and wait until it is done. Raises like ``check``."""
        if not self._inherited() and managed in self._queue:
            with self._changed:
                if (left := self._queue.pop(managed, None)) is not None:
                    self._queue = {managed: left} | self._queue
                self._changed.wait_for(lambda: managed not in self._queue)
        self.check()

    def drop(self) -> None:
        """Clear the queue without waiting. The thread ends after its current piece."""
        if not self._inherited():
            with self._changed:
                self._forget()

    def _forget(self) -> None:
        self._queue.clear()
        if self._at_work is not None:
            left, _ = self._at_work
            left.pieces.clear()
            self._queue[left.managed] = left

    @property
    def nbytes(self) -> int:
        """An upper bound on the host RAM still to be taken: a page that was written meanwhile is already there."""
        with self._changed:
            return sum(left.nbytes for left in self._queue.values() if left.owner() is not None)

    def _inherited(self) -> bool:
        """Whether this is a forked child, which has no such thread, and perhaps a lock that is never released."""
        return os.getpid() != self._process

    def _run(self) -> None:
        try:
            self._begin()
            while (work := self._next()) is not None:
                self._work_on(*work)
        except Exception as failure:  # noqa: BLE001 -- raised in the waiting threads
            with self._changed:
                self._failure = failure
                self._forget()
                self._next()

    def _work_on(self, left: _Left, spans: list[Span]) -> None:
        owner = left.owner()
        try:
            if owner is not None:
                self._populate(left.managed, spans)
        finally:
            del owner  # before notifying waiters, so that this thread does not keep the range alive, even after a failure

    def _next(self) -> tuple[_Left, list[Span]] | None:
        """The next piece; None if the queue is empty and the thread ends."""
        with self._changed:
            if self._at_work is not None:
                left, spans = self._at_work
                left.nbytes -= _taken_by(spans)
                if not left.pieces:
                    del self._queue[left.managed]
            first = next(iter(self._queue.values()), None)
            self._at_work = None if first is None else (first, first.pieces.popleft())
            if self._at_work is None:
                self._thread = None
            self._changed.notify_all()
            return self._at_work


def _taken_by(spans: Sequence[Span]) -> int:
    return sum(whole_blocks(span.nbytes) for span in spans)

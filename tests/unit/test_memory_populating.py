"""The thread that populates host pages while a model loads: what it does in which order, what it leaves alone, and how it
ends."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.harness.patience import patience
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, MOVE_BYTES, PAGE_BYTES
from sglang_uvm_offload.memory.populating import Populating
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, ManagedRange, Span

ROOT = Path(__file__).parents[2]


class Tensors:
    """They keep a range."""


class Driver:
    """Populates a piece once it is told to: ``piece`` tells which one waits, and ``go_on`` lets it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Span]] = []
        self.threads: set[threading.Thread] = set()
        self.fails: Callable[[], None] = lambda: None
        self._waiting: queue.Queue[tuple[str, Span]] = queue.Queue()
        self._told: queue.Queue[None] = queue.Queue()

    def populate(self, managed: ManagedRange, spans: Sequence[Span]) -> None:
        (span,) = spans
        self._waiting.put((managed.name, span))
        self._told.get(timeout=patience(60))
        self.calls.append((managed.name, span))
        self.threads.add(threading.current_thread())
        self.fails()

    def piece(self) -> tuple[str, Span]:
        return self._waiting.get(timeout=patience(60))

    def go_on(self, pieces: int = 1) -> None:
        for _ in range(pieces):
            self._told.put(None)


def made(name: str, pieces: int = 1) -> tuple[ManagedRange, Tensors, list[Span]]:
    nbytes = pieces * MOVE_BYTES - PAGE_BYTES
    return ManagedRange(BLOCK_BYTES, nbytes, name), Tensors(), [Span(0, nbytes)]


@contextmanager
def running() -> Iterator[tuple[Driver, Populating]]:
    driver = Driver()
    populating = Populating(driver.populate)
    yield driver, populating
    populating.drop()
    driver.go_on(100)


def test_ranges_are_populated_on_another_thread_in_order_and_in_pieces() -> None:
    with running() as (driver, populating):
        (a, of_a, spans_a), (b, of_b, spans_b) = made("a", 2), made("b")
        populating.add(a, weakref.ref(of_a), spans_a)
        populating.add(b, weakref.ref(of_b), spans_b)
        assert driver.piece() == ("a", Span(0, MOVE_BYTES))
        assert driver.calls == []
        driver.go_on(3)
        populating.wait()
        assert driver.calls == [("a", Span(0, MOVE_BYTES)), ("a", Span(MOVE_BYTES, a.nbytes - MOVE_BYTES)), ("b", *spans_b)]
        (thread,) = driver.threads
        assert thread is not threading.current_thread()
        assert thread.daemon, "or an exit would wait for it"
        thread.join(patience(60))
        assert not thread.is_alive(), "nothing is left to do"
        populating.add(b, weakref.ref(of_b), spans_b)
        driver.go_on()
        populating.wait()
        assert [name for name, _ in driver.calls] == ["a", "a", "b", "b"]


def test_a_range_that_is_waited_for_comes_next() -> None:
    with running() as (driver, populating):
        (a, of_a, spans_a), (b, of_b, spans_b), (c, of_c, spans_c) = made("a", 2), made("b"), made("c", 2)
        for managed, tensors, spans in ((a, of_a, spans_a), (b, of_b, spans_b), (c, of_c, spans_c)):
            populating.add(managed, weakref.ref(tensors), spans)
        driver.piece()
        waiter = threading.Thread(target=populating.wait_for, args=(c,), daemon=True)
        waiter.start()
        while next(iter(populating._queue)) is not c:
            threading.Event().wait(0.001)
        driver.go_on()
        for piece in (Span(0, MOVE_BYTES), Span(MOVE_BYTES, c.nbytes - MOVE_BYTES)):
            assert waiter.is_alive()
            assert driver.piece() == ("c", piece)
            driver.go_on()
        waiter.join(patience(60))
        assert not waiter.is_alive()
        assert [name for name, _ in driver.calls] == ["a", "c", "c"]
        driver.go_on(2)
        populating.wait()
        assert [name for name, _ in driver.calls] == ["a", "c", "c", "a", "b"]
        populating.wait_for(c)
        populating.wait_for(made("of plain memory")[0])


def test_a_range_that_is_freed_in_the_queue_or_between_pieces_is_populated_no_further() -> None:
    with running() as (driver, populating):
        (a, of_a, spans_a), (b, of_b, spans_b), (c, of_c, spans_c) = made("a", 3), made("b"), made("c")
        for managed, tensors, spans in ((a, of_a, spans_a), (b, of_b, spans_b), (c, of_c, spans_c)):
            populating.add(managed, weakref.ref(tensors), spans)
        driver.piece()
        kept, freed_on = weakref.ref(of_a), []
        weakref.finalize(of_a, lambda: freed_on.append(threading.current_thread())).atexit = False
        del of_a, of_b, tensors
        gc.collect()
        assert kept() is not None, "its piece is under way"
        driver.go_on(2)
        populating.wait()
        assert driver.calls == [("a", Span(0, MOVE_BYTES)), ("c", *spans_c)]
        assert freed_on == [*driver.threads]


def test_what_is_not_populated_yet_counts_unless_it_is_freed() -> None:
    with running() as (driver, populating):
        (a, of_a, spans_a), (b, of_b, spans_b) = made("a", 3), made("b")
        populating.add(a, weakref.ref(of_a), [])
        assert populating.nbytes == 0
        populating.add(a, weakref.ref(of_a), spans_a)
        populating.add(b, weakref.ref(of_b), spans_b)
        driver.piece()
        assert populating.nbytes == 4 * MOVE_BYTES, "in whole blocks"
        driver.go_on()
        driver.piece()
        assert populating.nbytes == 3 * MOVE_BYTES
        del of_b
        assert populating.nbytes == 2 * MOVE_BYTES
        driver.go_on(2)
        populating.wait()
        assert populating.nbytes == 0


def test_a_failure_ends_it_and_is_raised_by_whoever_waits_or_adds() -> None:
    with running() as (driver, populating):
        (managed, tensors, spans), (other, of_other, _) = made("w13", 3), made("w2")
        failure = ManagedMemoryError("cudaMemPrefetchAsync", "w13", spans[0], "out of memory")

        def fail() -> None:
            raise failure

        driver.fails = fail
        populating.add(managed, weakref.ref(tensors), spans)
        populating.add(other, weakref.ref(of_other), [Span(0, other.nbytes)])
        driver.go_on(3)
        for action in (lambda: populating.wait_for(other), populating.wait, populating.check):
            with pytest.raises(ManagedMemoryError, match="w13"):
                action()
        with pytest.raises(ManagedMemoryError) as raised:
            populating.add(managed, weakref.ref(tensors), spans)
        assert raised.value is failure
        assert len(driver.calls) == 1
        assert populating.nbytes == 0
        gone = weakref.ref(tensors)
        del tensors
        assert gone() is None, "the failure keeps its range"


def test_a_thread_that_cannot_begin_fails_whoever_waits() -> None:
    def begin() -> None:
        raise RuntimeError("no such GPU")

    driver = Driver()
    populating = Populating(driver.populate, begin)
    managed, tensors, spans = made("a")
    populating.add(managed, weakref.ref(tensors), spans)
    with pytest.raises(RuntimeError, match="no such GPU"):
        populating.wait()
    assert driver.calls == []


def test_what_is_dropped_is_not_populated() -> None:
    with running() as (driver, populating):
        managed, tensors, spans = made("a", 3)
        populating.add(managed, weakref.ref(tensors), spans)
        driver.piece()
        populating.drop()
        driver.go_on(3)
        populating.wait()
        assert len(driver.calls) == 1


STUCK = """
import os, sys, threading, weakref
from sglang_uvm_offload.memory.populating import Populating
from sglang_uvm_offload.memory.protocol import ManagedRange, Span
reached = threading.Event()
def never(managed, spans):
    reached.set()
    threading.Event().wait()
class Tensors: pass
tensors = Tensors()
populating = Populating(never)
populating.add(ManagedRange(0, 1 << 30, "w13"), weakref.ref(tensors), [Span(0, 1 << 30)])
reached.wait()
"""


def end_of(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=patience(60), check=False
    )


def test_a_process_ends_while_its_thread_is_in_the_driver() -> None:
    ended = end_of(STUCK + "populating.drop()\nraise ValueError('no such checkpoint')")
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "ValueError: no such checkpoint"


def test_a_forked_child_neither_waits_for_the_thread_nor_for_its_lock() -> None:
    ended = end_of(
        STUCK
        + """
held = threading.Event()
def hold():
    with populating._changed:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
if not os.fork():
    populating.drop()
    populating.wait()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    )
    assert ended.stdout == "7\n", ended.stderr

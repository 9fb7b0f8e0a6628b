"""Saving beside the work: now and then, in pauses, and at the end; a failed save is told, and nothing waits."""

import logging
import threading

import pytest
from builders.threads import no_further_thread

from scripts.harness.patience import patience
from sglang_uvm_offload.files import autosave
from sglang_uvm_offload.files.autosave import PAUSE_SECONDS, PERIOD_SECONDS, Saver


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Learned:
    """What a server learned, as a number; ``files`` are the numbers that were written."""

    def __init__(self):
        self.value, self.saved, self.files = 0, 0, []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.waited = []

    def snapshot(self, wait):
        self.waited.append(wait)
        value = self.value
        return None if value == self.saved else lambda: self.write(value)

    def write(self, value):
        assert self.gate.wait(patience(10))
        if self.fails:
            raise OSError(28, "No space left on device")
        self.files.append(value)
        self.saved = value


def made():
    clock, learned = Clock(), Learned()
    return clock, learned, Saver("profile", learned.snapshot, clock)


def settle(saver):
    if saver._thread is not None:
        saver._thread.join()


def test_a_busy_server_saves_once_a_period():
    clock, learned, saver = made()
    learned.value = 1
    saver.save_if_due()
    settle(saver)
    assert learned.files == []
    clock.now += PERIOD_SECONDS
    saver.save_if_due()
    saver.save_if_due()
    settle(saver)
    assert learned.files == [1]
    assert learned.waited == [False]


def test_an_idle_server_saves_sooner_and_only_what_is_new():
    clock, learned, saver = made()
    learned.value = 1
    for _ in range(3):
        clock.now += PAUSE_SECONDS
        saver.save_when_idle()
        settle(saver)
    assert learned.files == [1]


def test_a_slow_disk_holds_nobody_up():
    clock, learned, saver = made()
    learned.value = 1
    learned.gate.clear()
    clock.now += PERIOD_SECONDS
    saver.save_if_due()  # returns although the write cannot end
    learned.value = 2
    clock.now += PERIOD_SECONDS
    saver.save_if_due()  # and starts no second one
    assert learned.waited == [False]
    learned.gate.set()
    saver.finish()
    assert learned.files == [1, 2]
    assert learned.waited == [False, True]


def test_a_failed_save_is_told_and_tried_again(caplog):
    clock, learned, saver = made()
    learned.value, learned.fails = 1, True
    with caplog.at_level(logging.ERROR):
        clock.now += PERIOD_SECONDS
        saver.save_if_due()
        settle(saver)
    assert "the profile could not be saved: [Errno 28] No space left on device. Serving goes on." in caplog.text
    learned.fails = False
    clock.now += PERIOD_SECONDS
    saver.save_if_due()
    settle(saver)
    assert learned.files == [1]


def test_nothing_new_at_the_end_writes_nothing():
    _, learned, saver = made()
    saver.finish()
    assert learned.files == []


def test_what_is_asked_for_is_saved_at_once_with_the_last_step_and_shown():
    _, learned, saver = made()
    learned.value = 1
    learned.gate.clear()
    saver.save_now()
    assert saver.under_way
    assert saver.saved_at is None
    learned.gate.set()
    settle(saver)
    assert learned.files == [1]
    assert learned.waited == [True]
    assert not saver.under_way
    assert saver.saved_at > 1.7e9
    assert (saver.failures, saver.error) == (0, None)


def test_what_is_asked_for_during_a_save_is_saved_after_it():
    _, learned, saver = made()
    learned.value = 1
    learned.gate.clear()
    saver.save_now()
    learned.value = 2
    saver.save_now()
    assert saver.under_way
    learned.gate.set()
    settle(saver)
    assert saver.under_way, "the second was forgotten"
    saver.save_if_due()
    settle(saver)
    assert learned.files == [1, 2]
    assert not saver.under_way


def test_nothing_new_is_nothing_to_wait_for():
    _, learned, saver = made()
    saver.save_now()
    assert not saver.under_way
    assert learned.files == []


def test_failures_are_counted_and_the_last_reason_is_kept_until_a_save_ends_well():
    _, learned, saver = made()
    learned.value, learned.fails = 1, True
    for _ in range(2):
        saver.save_now()
        settle(saver)
    assert saver.failures == 2
    assert "No space left" in saver.error
    learned.fails = False
    saver.save_now()
    settle(saver)
    assert (saver.failures, saver.error) == (2, None)


def refused(wait):
    raise MemoryError("no room")


@pytest.mark.parametrize("where", ["snapshot", "write"])
def test_an_end_at_which_anything_fails_tells_so_and_goes_on(caplog, where):
    saver = Saver("trace", refused if where == "snapshot" else lambda wait: lambda: refused(wait))
    with caplog.at_level(logging.ERROR):
        saver.finish()
    assert "the trace could not be saved: MemoryError: no room" in caplog.text


def test_an_end_does_not_wait_for_a_save_that_hangs(caplog, monkeypatch):
    monkeypatch.setattr(autosave, "LAST_SECONDS", 0.01)
    clock, learned, saver = made()
    learned.value = 1
    learned.gate.clear()
    clock.now += PERIOD_SECONDS
    saver.save_if_due()
    saver.finish()
    assert "the profile could not be saved: the save before hangs" in caplog.text
    assert learned.waited == [False], "another save was begun beside it"
    learned.gate.set()
    settle(saver)


def test_a_save_for_which_there_is_no_thread_is_told_once_a_period_and_made_later(caplog):
    clock, learned, saver = made()
    learned.value = 1
    clock.now += PERIOD_SECONDS
    with no_further_thread():
        for _ in range(3):
            saver.save_if_due()
            saver.save_when_idle()
            clock.now += PAUSE_SECONDS
    assert (saver.failures, saver.error) == (1, "RuntimeError: can't start new thread")
    assert caplog.text.count("the profile could not be saved") == 1
    assert not saver.under_way
    clock.now += PERIOD_SECONDS
    saver.save_if_due()
    settle(saver)
    assert learned.files == [1]
    assert saver.error is None


def test_a_snapshot_for_which_there_is_no_memory_is_told_and_taken_again():
    clock, learned, _ = made()
    short = [MemoryError("no room")]

    def snapshot(wait):
        if short:
            raise short.pop()
        return learned.snapshot(wait)

    saver = Saver("profile", snapshot, clock)
    learned.value = 1
    saver.save_now()
    assert (saver.failures, saver.error, saver.under_way) == (1, "MemoryError: no room", False)
    saver.save_now()
    settle(saver)
    assert learned.files == [1]


def test_an_end_for_which_there_is_no_thread_saves():
    _, learned, saver = made()
    learned.value = 1
    with no_further_thread():
        saver.save_now()
        saver.finish()
    assert learned.files == [1]


def test_an_exit_of_the_process_passes_through_a_save():
    def leave(wait):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Saver("profile", leave).save_now()

"""Saving beside the work: now and then, in pauses, and at the end; a failed save is told, and nothing waits."""

import threading

import pytest
from builders.threads import no_further_thread

from scripts.harness.patience import patience
from sglang_uvm_offload.files import autosave
from sglang_uvm_offload.files.atomic import WriteRefused
from sglang_uvm_offload.files.autosave import PAUSE_SECONDS, PERIOD_SECONDS, Saver


class Server:
    """What it learned, as a number; ``files`` are the numbers that were written."""

    def __init__(self):
        self.now, self.value, self.saved, self.files = 100.0, 1, 0, []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.waited = []
        self.saver = Saver("profile", self.snapshot, lambda: self.now)

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

    def after(self, seconds, save):
        self.now += seconds
        save()

    def settle(self):
        if self.saver._thread is not None:
            self.saver._thread.join()


@pytest.fixture
def server():
    return Server()


def test_a_busy_server_saves_once_a_period(server):
    server.saver.save_if_due()
    server.settle()
    assert server.files == []
    server.after(PERIOD_SECONDS, server.saver.save_if_due)
    server.saver.save_if_due()
    server.settle()
    assert (server.files, server.waited) == ([1], [False])


def test_an_idle_server_saves_sooner_and_only_what_is_new(server):
    for _ in range(3):
        server.after(PAUSE_SECONDS, server.saver.save_when_idle)
        server.settle()
    server.saver.save_now()
    assert not server.saver.under_way
    server.saver.finish()
    assert server.files == [1]


def test_a_slow_disk_holds_nobody_up(server):
    server.gate.clear()
    server.after(PERIOD_SECONDS, server.saver.save_if_due)  # returns although the write cannot end
    server.value = 2
    server.after(PERIOD_SECONDS, server.saver.save_if_due)  # and starts no second one
    assert server.waited == [False]
    server.gate.set()
    server.saver.finish()
    assert server.files == [1, 2]
    assert server.waited == [False, True]


def test_what_is_asked_for_is_saved_with_the_last_step_at_once_or_after_a_save_under_way(server):
    server.gate.clear()
    server.saver.save_now()
    assert (server.saver.under_way, server.saver.saved_at) == (True, None)
    server.value = 2
    server.saver.save_now()
    server.gate.set()
    server.settle()
    assert (server.files, server.waited) == ([1], [True])
    assert server.saver.under_way, "the second was forgotten"
    server.saver.save_if_due()
    server.settle()
    assert server.files == [1, 2]
    assert not server.saver.under_way
    assert server.saver.saved_at > 1.7e9


def test_failures_are_told_and_counted_and_the_last_reason_is_kept_until_a_save_ends_well(server, caplog):
    server.fails = True
    for _ in range(2):
        server.saver.save_now()
        server.settle()
    assert server.saver.failures == 2
    assert "No space left" in server.saver.error
    assert "the profile could not be saved: [Errno 28] No space left on device. Serving goes on." in caplog.text
    server.fails = False
    server.after(PERIOD_SECONDS, server.saver.save_if_due)
    server.settle()
    assert (server.files, server.saver.failures, server.saver.error) == ([1], 2, None)


def refused(wait):
    raise MemoryError("no room")


@pytest.mark.parametrize("snapshot", [refused, lambda wait: lambda: refused(wait)])
def test_an_end_at_which_anything_fails_tells_so_and_goes_on(caplog, snapshot):
    Saver("trace", snapshot).finish()
    assert "the trace could not be saved: MemoryError: no room" in caplog.text


def test_an_end_does_not_wait_for_a_save_that_hangs(server, caplog, monkeypatch):
    monkeypatch.setattr(autosave, "LAST_SECONDS", 0.01)
    server.gate.clear()
    server.after(PERIOD_SECONDS, server.saver.save_if_due)
    server.saver.finish()
    assert "the profile could not be saved: the previous save hangs" in caplog.text
    assert server.waited == [False], "another save was begun beside it"
    server.gate.set()
    server.settle()


def test_a_save_for_which_there_is_no_thread_is_told_once_a_period_and_made_later(server, caplog):
    server.now += PERIOD_SECONDS
    with no_further_thread():
        for _ in range(3):
            server.saver.save_if_due()
            server.after(PAUSE_SECONDS, server.saver.save_when_idle)
    assert (server.saver.failures, server.saver.error) == (1, "RuntimeError: can't start new thread")
    assert caplog.text.count("the profile could not be saved") == 1
    assert not server.saver.under_way
    with no_further_thread():
        server.saver.finish()
    assert server.files == [1], "an end needs no thread"
    assert server.saver.error is None


def test_a_snapshot_for_which_there_is_no_memory_is_told_and_taken_again(server, monkeypatch):
    monkeypatch.setattr(server.saver, "_snapshot", refused)
    server.saver.save_now()
    assert (server.saver.failures, server.saver.error, server.saver.under_way) == (1, "MemoryError: no room", False)
    monkeypatch.undo()
    server.saver.save_now()
    server.settle()
    assert server.files == [1]


def test_an_exit_of_the_process_passes_through_a_save():
    def leave(wait):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Saver("profile", leave).save_now()


def test_a_server_that_ends_logs_what_is_saved_once_and_again_if_more_comes(server, caplog, tmp_path):
    caplog.set_level("INFO")
    server.saver = Saver("profile", server.snapshot, lambda: server.now, path=tmp_path / "p.npz")
    saved = f"the profile is saved to {tmp_path}/p.npz"
    server.after(PERIOD_SECONDS, server.saver.save_if_due)
    server.settle()
    assert caplog.text == "", "a server that goes on logs no save"
    for value, times in ((1, 0), (2, 1), (2, 1)):
        server.value = value
        server.saver.begin_end()
        server.settle()
        assert caplog.text.count(saved) == times
    server.saver.finish()
    assert caplog.text.count(saved) == 1
    server.value = 3
    server.saver.finish()
    assert caplog.text.count(saved) == 2
    assert server.files == [1, 2, 3]


def test_a_server_that_ends_logs_that_what_an_earlier_save_wrote_is_saved(server, caplog):
    caplog.set_level("INFO")
    server.saver.save_now()
    server.settle()
    server.saver.finish()
    assert [record.getMessage() for record in caplog.records] == ["Expert offload: the profile is saved"]


def test_a_server_that_had_nothing_to_save_logs_nothing_at_its_end(caplog):
    caplog.set_level("INFO")
    saver = Saver("profile", lambda wait: None)
    saver.begin_end()
    saver.finish()
    assert caplog.text == ""


def test_a_save_that_is_refused_is_logged_once_for_each_reason_and_counted_each_time(tmp_path, caplog):
    reasons = iter(["is another one's", "is another one's", "is a folder"])

    def write():
        raise WriteRefused(tmp_path / "p.npz", next(reasons))

    saver = Saver("profile", lambda wait: write)
    for _ in range(3):
        saver.save_now()
        saver._thread.join()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "p.npz: is another one's. Serving goes on." in caplog.records[0].getMessage()
    assert (saver.failures, saver.error) == (3, f"{tmp_path}/p.npz: is a folder")

"""A lock that nobody waits for without end, and that changes no file."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from sglang_uvm_offload.files import lock

HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_one_process_has_it_and_the_next_after_it_and_the_file_keeps_what_it_holds(tmp_path):
    (tmp_path / "lock").write_text("precious")
    for _ in range(2):
        with lock.held(tmp_path / "lock", 0) as alone, lock.held(tmp_path / "lock", 0) as second:
            assert (alone, second) == (True, False)
    assert (tmp_path / "lock").read_text() == "precious"


def test_a_stopped_holder_is_waited_for_only_so_long_and_a_killed_one_has_it_no_more(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "lock")], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        holder.send_signal(signal.SIGSTOP)
        with lock.held(tmp_path / "lock", 0.3) as alone:
            assert not alone
        holder.kill()
        with lock.held(tmp_path / "lock", 60) as alone:
            assert alone


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_where_there_are_no_locks_the_work_goes_on(tmp_path, code, monkeypatch):
    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with lock.held(tmp_path / "lock", 60) as alone:
        assert not alone


def test_what_is_no_file_is_no_lock(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "dangling", "folder", "pipe", "nowhere/lock"):
        with lock.held(tmp_path / name, 0) as alone:
            assert not alone, name
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()

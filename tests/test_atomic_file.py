"""A file is replaced whole or not at all."""

import os
import stat

import pytest

from sglang_uvm_offload import atomic_file


def write(text):
    return lambda file: file.write(text)


def test_the_new_contents_are_at_the_path_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "trace.npz"
    for text in (b"old", b"new"):
        atomic_file.replace(path, write(text))
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["trace.npz"]


def test_who_reads_meanwhile_finds_the_old_contents(tmp_path):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"old")
    seen = []

    def half(file):
        file.write(b"ne")
        file.flush()
        seen.append(path.read_bytes())

    atomic_file.replace(path, half)
    assert seen == [b"old"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_contents_and_no_temporary_file(tmp_path, error):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half of it")
        raise error

    with pytest.raises(type(error)):
        atomic_file.replace(path, fail)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["trace.npz"]


def test_what_was_written_is_on_the_disk_before_it_takes_the_place_of_the_old(tmp_path, monkeypatch):
    order, sync, move = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append(("synced", os.fstat(handle).st_size)), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("moved"), move(*paths)))
    atomic_file.replace(tmp_path / "trace.npz", write(b"new"))
    assert order == [("synced", 3), "moved"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_file_has_the_mode_of_a_file_made_anew(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        atomic_file.replace(tmp_path / "trace.npz", write(b"new"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "trace.npz").stat().st_mode) == mode


def test_a_folder_that_is_gone_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        atomic_file.replace(tmp_path / "gone" / "trace.npz", write(b"new"))


def test_a_device_or_a_folder_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(FileExistsError, match="Not a regular file"):
            atomic_file.replace(path, write(b"new"))
    assert stat.S_ISFIFO(pipe.stat().st_mode)

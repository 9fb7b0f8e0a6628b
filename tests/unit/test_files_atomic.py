"""A file is replaced whole or not at all, and only by a file of its own kind."""

import os
import signal
import stat
from pathlib import Path

import pytest
from paths import SAFETENSORS, WAYS, direct, hard_link, link_to_the_folder, symbolic_link, with_dots

from scripts.harness.patience import patience
from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files.atomic import Kind, WriteRefused, refusal

NOTE = Kind("note", lambda path: path.read_bytes().startswith(b"note"))


def write(text):
    return lambda file: file.write(text)


def test_the_new_contents_are_at_the_path_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "trace.npz"
    for text in (b"note, old", b"note, new"):
        atomic_file.replace(path, write(text), NOTE)
    assert path.read_bytes() == b"note, new"
    assert os.listdir(tmp_path) == ["trace.npz"]


def test_who_reads_meanwhile_finds_the_old_contents(tmp_path):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"note, old")
    seen = []

    def half(file):
        file.write(b"no")
        file.flush()
        seen.append(path.read_bytes())

    atomic_file.replace(path, half, NOTE)
    assert seen == [b"note, old"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("no"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_contents_and_no_temporary_file(tmp_path, error):
    path = tmp_path / "trace.npz"
    path.write_bytes(b"note, old")

    def fail(file):
        file.write(b"half of it")
        raise error

    with pytest.raises(type(error)):
        atomic_file.replace(path, fail, NOTE)
    assert path.read_bytes() == b"note, old"
    assert os.listdir(tmp_path) == ["trace.npz"]


def test_what_was_written_is_on_the_disk_before_it_takes_the_place_of_the_old(tmp_path, monkeypatch):
    order, sync, move = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append(("synced", os.fstat(handle).st_size)), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("moved"), move(*paths)))
    atomic_file.replace(tmp_path / "trace.npz", write(b"note, new"), NOTE)
    assert order == [("synced", 9), "moved"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_the_file_has_the_mode_of_a_file_made_anew(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        atomic_file.replace(tmp_path / "trace.npz", write(b"note, new"), NOTE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "trace.npz").stat().st_mode) == mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o400])
def test_a_file_keeps_its_mode_also_while_it_is_written(tmp_path, mode):
    path, seen = tmp_path / "a.note", []
    path.write_bytes(b"note")
    path.chmod(mode)

    def writes(file):
        seen.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        file.write(b"note, new")

    atomic_file.replace(path, writes, NOTE)
    assert [*seen, stat.S_IMODE(path.stat().st_mode)] == [mode, mode]


def test_a_file_keeps_its_owner_and_its_group(tmp_path):
    path = tmp_path / "a.note"
    path.write_bytes(b"note")
    path.chmod(0o640)
    try:
        os.chown(path, 1234, 2345)
    except PermissionError:
        pytest.skip("only root gives files away")
    atomic_file.replace(path, write(b"note, new"), NOTE)
    there = path.stat()
    assert (there.st_uid, there.st_gid, stat.S_IMODE(there.st_mode)) == (1234, 2345, 0o640)


def test_a_group_that_had_no_rights_gets_none(tmp_path, monkeypatch):
    def forbidden(handle, owner, group):
        raise PermissionError

    path = tmp_path / "a.note"
    path.write_bytes(b"note")
    path.chmod(0o664)
    there = path.stat()
    monkeypatch.setattr(os, "fchown", forbidden)
    monkeypatch.setattr(os, "stat", other_group(os.stat, path))
    atomic_file.replace(path, write(b"note, new"), NOTE)
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o604
    assert there.st_gid == os.lstat(path).st_gid


def other_group(real, path):
    """``os.stat`` that shows ``path`` as another group's."""

    def shown(at, **how):
        found = real(at, **how)
        if str(at) != str(path):
            return found
        fields = [*found]
        fields[stat.ST_GID] += 1
        return os.stat_result(fields)

    return shown


def temporaries(folder):
    return sorted(path.name for path in folder.glob(".*"))


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "a.note"
    child = os.fork()
    if child == 0:
        atomic_file.replace(path, lambda file: os._exit(9), NOTE)
    os.waitpid(child, 0)
    (left,) = temporaries(tmp_path)
    others = [".a.note.012345678", ".a.note.0123456x", ".b.note.01234567", "a.note.01234567"]
    for name in others:
        (tmp_path / name).write_text("another's")
    atomic_file.replace(path, lambda file: file.write(b"note"), NOTE)
    assert left not in temporaries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.note", *others}


def test_a_pipe_named_as_a_killed_writer_names_its_file_is_not_waited_for(tmp_path):
    pipe = tmp_path / ".a.note.01234567"
    os.mkfifo(pipe)
    child = os.fork()
    if child == 0:
        signal.alarm(round(patience(30)))  # ends a child that waits
        atomic_file.replace(tmp_path / "a.note", lambda file: file.write(b"note"), NOTE)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert pipe.is_fifo()


def test_the_file_of_a_writer_that_lives_stays(tmp_path):
    path = tmp_path / "a.note"

    def write(file):
        atomic_file.replace(path, lambda other: other.write(b"note 1"), NOTE)
        assert len(temporaries(tmp_path)) == 1
        file.write(b"note 2")

    atomic_file.replace(path, write, NOTE)
    assert path.read_bytes() == b"note 2"
    assert temporaries(tmp_path) == []


def test_a_folder_that_is_gone_is_an_os_error(tmp_path):
    with pytest.raises(WriteRefused, match=f"there is no folder {tmp_path}/gone"):
        atomic_file.replace(tmp_path / "gone" / "trace.npz", write(b"note, new"), NOTE)


def assert_refused(path: Path, reason: str, protected: atomic_file.Protected = atomic_file.NOTHING) -> None:
    """Both when asked beforehand and when writing, of which nothing is left."""
    assert reason in (refusal(path, NOTE, protected) or "is allowed")
    before = sorted(path.parent.iterdir())
    with pytest.raises(WriteRefused, match=reason) as caught:
        atomic_file.replace(path, write(b"note, new"), NOTE, protected)
    assert caught.value.filename == str(path)
    assert sorted(path.parent.iterdir()) == before


@pytest.fixture
def weights(tmp_path):
    """A checkpoint's file, beside an empty folder ``work``."""
    (tmp_path / "model").mkdir()
    (tmp_path / "work").mkdir()
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(SAFETENSORS)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_another_kind_is_not_replaced_whatever_leads_there(weights, tmp_path, way):
    assert_refused(way(weights, tmp_path / "work"), "exists and is no note")
    assert weights.read_bytes() == SAFETENSORS


def test_a_relative_path_is_refused_too(weights, monkeypatch):
    monkeypatch.chdir(weights.parent)
    assert_refused(Path(weights.name), "exists and is no note")


def test_an_empty_file_is_replaced(tmp_path):
    path = tmp_path / "p"
    path.touch()
    atomic_file.replace(path, write(b"note, new"), NOTE)
    assert path.read_bytes() == b"note, new"


def test_a_file_that_cannot_be_examined_stays(tmp_path):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "p"
    path.write_bytes(b"note, old")
    assert refusal(path, Kind("note", fail)) == "cannot be examined: Permission denied"
    with pytest.raises(WriteRefused):
        atomic_file.replace(path, write(b"note, new"), Kind("note", fail))
    assert path.read_bytes() == b"note, old"


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "store").mkdir()
    link = tmp_path / "p"
    link.symlink_to("store/p")
    for text in (b"note, old", b"note, new"):
        atomic_file.replace(link, write(text), NOTE)
        assert link.is_symlink()
        assert (tmp_path / "store" / "p").read_bytes() == text
    assert os.listdir(tmp_path / "store") == ["p"]


def test_a_hard_link_keeps_the_old_contents(tmp_path):
    (tmp_path / "p").write_bytes(b"note, old")
    os.link(tmp_path / "p", tmp_path / "q")
    atomic_file.replace(tmp_path / "p", write(b"note, new"), NOTE)
    assert (tmp_path / "q").read_bytes() == b"note, old"


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert_refused(tmp_path / "a", "not a regular file")


def test_a_device_or_a_folder_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert_refused(pipe, "not a regular file")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    (tmp_path / "folder").mkdir()
    assert_refused(tmp_path / "folder", "must be the path of a file")
    assert "not a regular file" in (refusal(Path("/dev/null"), NOTE) or "")


def test_an_open_pipe_is_not_a_file():
    """``--out /dev/stdout`` in a shell's pipe."""
    reading, writing = os.pipe()
    try:
        assert "not a regular file" in (refusal(Path(f"/proc/self/fd/{writing}"), NOTE) or "")
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    assert "cannot be written to" in (refusal(tmp_path / "p", NOTE) or "")


@pytest.mark.parametrize("way", [direct, with_dots, symbolic_link, link_to_the_folder])
@pytest.mark.parametrize("contents", [None, b"", b"note, old"])
def test_nothing_is_written_in_a_protected_folder(weights, tmp_path, way, contents):
    """Not even a new file, or in the place of one of the same kind."""
    weights.unlink()
    if contents is not None:
        weights.write_bytes(contents)
    protected = {tmp_path / "work" / ".." / "model": "the model's folder"}
    assert_refused(way(weights, tmp_path / "work"), "lies in the model's folder", protected)


def test_what_lies_deeper_in_a_protected_folder_is_protected(weights):
    (weights.parent / "deeper").mkdir()
    assert_refused(weights.parent / "deeper" / "p", "lies in the model's folder", {weights.parent: "the model's folder"})


@pytest.mark.parametrize("way", [direct, with_dots, symbolic_link, hard_link])
def test_a_protected_file_is_not_replaced_by_whatever_name(weights, tmp_path, way):
    weights.write_bytes(b"note, old")
    assert_refused(way(weights, tmp_path / "work"), "is the source", {weights: "the source"})
    assert weights.read_bytes() == b"note, old"


def test_two_names_of_a_file_that_is_still_to_be_made_are_one(tmp_path):
    assert_refused(tmp_path / "p", "is the source", {tmp_path / "x" / ".." / "p": "the source"})


def appears(path, other):
    path.write_bytes(SAFETENSORS)


def becomes_a_link(path, other):
    path.symlink_to(other)


def becomes_a_folder(path, other):
    path.mkdir()


@pytest.mark.parametrize("change", [appears, becomes_a_link, becomes_a_folder])
def test_what_comes_to_the_path_while_writing_stays(weights, tmp_path, change):
    path = tmp_path / "work" / "p"

    def slow(file):
        file.write(b"note, new")
        change(path, weights)

    with pytest.raises(WriteRefused):
        atomic_file.replace(path, slow, NOTE)
    assert os.listdir(path.parent) == ["p"]
    assert path.is_dir() or path.read_bytes() == SAFETENSORS
    assert weights.read_bytes() == SAFETENSORS

"""A file is replaced whole or not at all, and only by a file of its own kind."""

import os
import stat
from pathlib import Path

import pytest
from paths import SAFETENSORS, WAYS, direct, hard_link, link_to_the_folder, symbolic_link, with_dots

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files.atomic import Kind, WriteRefused, refusal

NOTE = Kind("note", lambda path: path.read_bytes().startswith(b"note"))


def write(text):
    return lambda file: file.write(text)


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "a.note"
    path.write_bytes(b"note, old")
    return path


def test_who_reads_meanwhile_finds_the_old_contents_and_nothing_else_is_left(old):
    seen = []

    def half(file):
        file.write(b"note")
        file.flush()
        seen.append(old.read_bytes())

    atomic_file.replace(old, half, NOTE)
    assert seen == [b"note, old"]
    assert old.read_bytes() == b"note"
    assert os.listdir(old.parent) == [old.name]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_contents_and_no_temporary_file(old, error):
    def fail(file):
        file.write(b"half of it")
        raise error

    with pytest.raises(type(error)):
        atomic_file.replace(old, fail, NOTE)
    assert old.read_bytes() == b"note, old"
    assert os.listdir(old.parent) == [old.name]


def test_what_was_written_is_on_the_disk_before_it_takes_the_place_of_the_old(tmp_path, monkeypatch):
    order, sync, move = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (order.append(("synced", os.fstat(handle).st_size)), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (order.append("moved"), move(*paths)))
    atomic_file.replace(tmp_path / "trace.npz", write(b"note, new"), NOTE)
    assert order == [("synced", 9), "moved"]


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_new_file_has_the_mode_of_the_umask(tmp_path, umask, expected):
    before = os.umask(umask)
    try:
        atomic_file.replace(tmp_path / "trace.npz", write(b"note, new"), NOTE)
    finally:
        os.umask(before)
    assert mode(tmp_path / "trace.npz") == expected


@pytest.mark.parametrize("kept", [0o600, 0o664, 0o400])
def test_a_file_keeps_its_mode_also_while_it_is_written(old, kept):
    seen = []
    old.chmod(kept)
    atomic_file.replace(old, lambda file: seen.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode)), NOTE)
    assert [*seen, mode(old)] == [kept, kept]


def test_a_file_keeps_its_owner_and_its_group(old):
    old.chmod(0o640)
    try:
        os.chown(old, 1234, 2345)
    except PermissionError:
        pytest.skip("only root gives files away")
    atomic_file.replace(old, write(b"note, new"), NOTE)
    there = old.stat()
    assert (there.st_uid, there.st_gid, mode(old)) == (1234, 2345, 0o640)


def test_a_group_that_had_no_rights_gets_none(old, monkeypatch):
    def forbidden(handle, owner, group):
        raise PermissionError

    def of_another_group(at, **how):
        fields = [*real(at, **how)]
        fields[stat.ST_GID] += str(at) == str(old)
        return os.stat_result(fields)

    old.chmod(0o664)
    real = os.stat
    monkeypatch.setattr(os, "fchown", forbidden)
    monkeypatch.setattr(os, "stat", of_another_group)
    atomic_file.replace(old, write(b"note, new"), NOTE)
    assert mode(old) == 0o604


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
    atomic_file.replace(path, write(b"note"), NOTE)
    assert left not in temporaries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"a.note", *others}


def test_the_file_of_a_writer_that_lives_stays(tmp_path):
    path = tmp_path / "a.note"

    def slow(file):
        atomic_file.replace(path, write(b"note 1"), NOTE)
        assert len(temporaries(tmp_path)) == 1
        file.write(b"note 2")

    atomic_file.replace(path, slow, NOTE)
    assert path.read_bytes() == b"note 2"
    assert temporaries(tmp_path) == []


def assert_refused(path: Path, reason: str, protected: atomic_file.Protected = atomic_file.NOTHING, kind: Kind = NOTE) -> None:
    """Both when asked beforehand and when writing, of which nothing is left."""
    assert reason in (refusal(path, kind, protected) or "is allowed")
    before = sorted(path.parent.iterdir()) if path.parent.exists() else []
    with pytest.raises(WriteRefused, match=reason) as caught:
        atomic_file.replace(path, write(b"note, new"), kind, protected)
    assert caught.value.filename == str(path)
    assert not before or sorted(path.parent.iterdir()) == before


@pytest.fixture
def weights(tmp_path):
    """A checkpoint's file, beside an empty folder ``work``."""
    (tmp_path / "model").mkdir()
    (tmp_path / "work").mkdir()
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(SAFETENSORS)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_a_file_of_another_kind_is_not_replaced_whatever_leads_there(weights, tmp_path, way, monkeypatch):
    path = way(weights, tmp_path / "work")
    assert_refused(path, "exists and is not a note")
    monkeypatch.chdir(path.parent)
    assert_refused(Path(path.name), "exists and is not a note")
    assert weights.read_bytes() == SAFETENSORS


def test_an_empty_file_is_replaced_and_one_that_cannot_be_examined_stays(old):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    assert_refused(old, "cannot be examined: Permission denied", kind=Kind("note", fail))
    assert old.read_bytes() == b"note, old"
    old.write_bytes(b"")
    atomic_file.replace(old, write(b"note, new"), Kind("note", fail))
    assert old.read_bytes() == b"note, new"


def test_a_symbolic_link_stays_and_its_file_is_replaced_and_a_hard_link_keeps_the_old_contents(old):
    link, other = old.parent / "link", old.parent / "other"
    link.symlink_to(old.name)
    os.link(old, other)
    atomic_file.replace(link, write(b"note, new"), NOTE)
    assert link.is_symlink()
    assert old.read_bytes() == b"note, new"
    assert other.read_bytes() == b"note, old"


def test_what_is_no_regular_file_is_not_replaced(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert_refused(tmp_path / "a", "not a regular file")
    assert_refused(tmp_path / "pipe", "not a regular file")
    assert_refused(tmp_path / "folder", "give the path of a file")
    assert_refused(tmp_path / "gone" / "p", f"there is no folder {tmp_path}/gone")
    assert "not a regular file" in (refusal(Path("/dev/null"), NOTE) or "")
    reading, writing = os.pipe()  # ``--out /dev/stdout`` in a shell's pipe
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
@pytest.mark.parametrize("contents", [None, b"note, old"])
def test_nothing_is_written_in_a_protected_folder(weights, tmp_path, way, contents):
    """Not even a new file, or in the place of one of the same kind."""
    weights.unlink()
    if contents is not None:
        weights.write_bytes(contents)
    protected = {tmp_path / "work" / ".." / "model": "the model's folder"}
    assert_refused(way(weights, tmp_path / "work"), "lies in the model's folder", protected)
    (weights.parent / "deeper").mkdir()
    assert_refused(weights.parent / "deeper" / "p", "lies in the model's folder", protected)


@pytest.mark.parametrize("way", [direct, with_dots, symbolic_link, hard_link])
def test_a_protected_file_is_not_replaced_by_whatever_name(old, tmp_path, way):
    (tmp_path / "work").mkdir()
    assert_refused(way(old, tmp_path / "work"), "is the source", {old: "the source"})
    assert old.read_bytes() == b"note, old"
    assert_refused(tmp_path / "p", "is the source", {tmp_path / "x" / ".." / "p": "the source"})  # still to be made


@pytest.mark.parametrize(
    "change", [lambda path, other: path.write_bytes(SAFETENSORS), Path.symlink_to, lambda path, other: path.mkdir()]
)
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

"""The cache is where nobody else can write, and what is read from it is what was written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sglang_uvm_offload.files import cache

ANOTHER = 12345
"""A user whom no machine knows."""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``XDG_CACHE_HOME``; temporary files are beside it."""
    base, temporary = tmp_path / "base", tmp_path / "temporary"
    temporary.mkdir()
    base.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    cache._warn.cache_clear()
    return base


def instead(base: Path) -> Path:
    return base.with_name("temporary") / f"sglang-uvm-offload-{os.geteuid()}" / "things"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_folder_is_made_for_this_user_alone(base, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "not" / "there"))
    old = os.umask(0)
    try:
        folder = cache.private_folder("things")
    finally:
        os.umask(old)
    assert folder == base / "not" / "there" / "sglang-uvm-offload" / "things"
    assert {mode(made) for made in (folder, *list(folder.parents)[:3])} == {0o700}
    folder.chmod(0o755)
    assert cache.private_folder("things") == folder, "others may read"


def open_to(bits: int):
    return lambda path: path.chmod(bits)


def given_away(path: Path) -> None:
    os.chown(path, ANOTHER, ANOTHER)


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_file(path: Path) -> None:
    for there in path.glob("*"):
        there.rmdir()
    path.rmdir()
    path.touch()


@pytest.mark.parametrize("which", ["sglang-uvm-offload", "sglang-uvm-offload/things"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (open_to(0o775), "is open to other users (mode 775); remove it, and it is created again"),
        (open_to(0o707), "is open to other users (mode 707)"),
        pytest.param(given_away, f"belongs to another user (uid {ANOTHER})", marks=needs_root),
        (linked, "is a symbolic link"),
        (a_file, "is not of the expected kind"),
    ],
)
def test_a_folder_that_others_could_have_filled_is_not_used(base, which, spoil, reason, caplog):
    (base / "sglang-uvm-offload" / "things").mkdir(parents=True)
    spoil(base / which)
    assert cache.private_folder("things") == cache.private_folder("things") == instead(base)
    assert mode(instead(base)) == mode(instead(base).parent) == 0o700
    (said,) = caplog.messages
    assert f"{base / which} {reason}" in said
    assert str(instead(base).parent) in said


@pytest.mark.parametrize(("above", "used"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_nobody_can_put_another_folder_in_its_place(base, above, used):
    base.chmod(above)
    assert (cache.private_folder("things") == base / "sglang-uvm-offload" / "things") is used


@needs_root
@pytest.mark.parametrize("above", [0o770, 0o2775])
def test_nor_can_a_group_that_is_not_this_users(base, above):
    os.chown(base, 0, ANOTHER)
    base.chmod(above)
    assert cache.private_folder("things") == instead(base)


@pytest.mark.parametrize(("open_to_all", "used"), [(None, True), ("disk", False), ("disk/scratch", False), ("homes", False)])
def test_a_linked_home_is_used_as_clusters_have_it(base, tmp_path, open_to_all, used, monkeypatch):
    (tmp_path / "disk" / "scratch").mkdir(parents=True)
    (tmp_path / "homes").mkdir()
    (tmp_path / "homes" / "link").symlink_to(tmp_path / "disk" / "scratch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "homes" / "link"))
    if open_to_all:
        (tmp_path / open_to_all).chmod(0o777)
    assert (cache.private_folder("things") == tmp_path / "homes" / "link" / "sglang-uvm-offload" / "things") is used


@pytest.mark.parametrize("relative", [".", "cache"])
def test_a_relative_place_is_none(base, relative, monkeypatch):
    """The current folder may be a downloaded model."""
    monkeypatch.chdir(base)
    monkeypatch.setenv("XDG_CACHE_HOME", relative)
    monkeypatch.setenv("HOME", str(base / "home"))
    assert cache.private_folder("things") == base / "home" / ".cache" / "sglang-uvm-offload" / "things"


@pytest.mark.parametrize("home", [None, "somewhere"])
def test_a_user_without_a_home_gets_a_temporary_place(base, home, monkeypatch, caplog):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(cache.pwd, "getpwuid", unknown)
    assert cache.private_folder("things") == instead(base)
    assert not caplog.records


@pytest.mark.parametrize("spoil", [open_to(0o775), linked, open_to(0o755)], ids=["open", "linked", "readable"])
def test_where_no_place_is_safe_the_error_says_all_and_what_to_set(base, spoil):
    base.chmod(0o777)
    instead(base).parent.mkdir(mode=0o700)
    spoil(instead(base).parent)
    with pytest.raises(OSError, match="set XDG_CACHE_HOME to a folder that only this user can write to") as refused:
        cache.private_folder("things")
    assert f"lies in {base}, which other users can write to" in str(refused.value)
    assert f"{instead(base).parent} is" in str(refused.value)


def test_a_place_that_cannot_be_is_named(base, monkeypatch, caplog):
    (base / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "file"))
    assert cache.private_folder("things") == instead(base)
    assert f"{base / 'file'}" in caplog.text


def test_what_root_filled_is_used_by_others(base, monkeypatch):
    folder = base / "sglang-uvm-offload" / "things"
    folder.mkdir(parents=True)
    monkeypatch.setattr(cache.os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match=f"{folder} cannot be written to"):
        cache.private_folder("things")
    (folder / "library").touch()
    assert cache.private_folder("things") == folder


@pytest.fixture
def kept(base) -> Path:
    path = cache.private_folder("things") / "thing"
    cache.seal(path, b"contents" * 10)
    return path


def test_a_kept_file_is_what_was_written_and_for_this_user_alone(kept):
    assert cache.sealed(kept) == b"contents" * 10
    assert kept.read_bytes().startswith(b"contents"), "a loader reads over what follows"
    assert mode(kept) == 0o600
    cache.seal(kept, b"")
    assert cache.sealed(kept) == b""
    assert [file.name for file in kept.parent.iterdir()] == ["thing"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        lambda path: path.write_bytes(b"C" + path.read_bytes()[1:]),
        open_to(0o620),
        open_to(0o602),
        linked,
        Path.unlink,
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: (path.unlink(), os.mkfifo(path)),
        pytest.param(given_away, marks=needs_root),
    ],
)
def test_a_damaged_or_foreign_file_is_as_none(kept, damage):
    damage(kept)
    assert cache.sealed(kept) is None


def test_a_file_is_on_the_disk_before_it_has_its_name(kept, monkeypatch):
    """Else a crash of the machine leaves a name without contents."""
    did, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(cache.os, "fsync", lambda handle: (did.append(os.fstat(handle).st_size), fsync(handle)))
    monkeypatch.setattr(cache.os, "replace", lambda *names: (did.append("named"), rename(*names)))
    cache.replace(kept, b"1234567")
    assert did[:2] == [7, "named"]
    assert len(did) == 3, "the folder follows"


def test_a_write_that_fails_leaves_what_was_there(kept, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        cache.seal(kept, b"new")
    assert cache.sealed(kept) == b"contents" * 10
    assert [file.name for file in kept.parent.iterdir()] == ["thing"]

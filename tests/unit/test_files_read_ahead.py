"""What the kernel is asked to read before a reader comes to it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_uvm_offload.files import read_ahead
from sglang_uvm_offload.files.read_ahead import AT_ONCE, TURN, Part, ReadAhead, Share, request_bytes

Asked = list[tuple[str, int, int]]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.touch()
        os.truncate(path, 10 * TURN)
    return paths


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """(name of the file, offset, bytes) of each request."""
    found: Asked = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), offset, length))

    monkeypatch.setattr(read_ahead.os, "posix_fadvise", advise)
    return found


def parts(files: list[Path]) -> list[Part]:
    """Not in the order of the files: from the end of each."""
    return [Part(str(path), turn * TURN, TURN) for path in files for turn in reversed(range(10))]


def total(asked: Asked) -> int:
    return sum(nbytes for *_, nbytes in asked)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_parts_are_asked_for_in_their_order_each_once_up_to_the_window(files: list[Path], asked: Asked) -> None:
    before, window = open_files(), 7 * TURN
    ahead, early = ReadAhead(parts(files), window=window), []
    for done in range(21):
        ahead.read(TURN if done else 0)
        early.append(total(asked) - done * TURN)
    assert open_files() == before + 1, "the file at hand"
    ahead.close()
    assert open_files() == before
    places = [(name, offset // TURN) for name, offset, _ in asked]
    assert list(dict.fromkeys(places)) == [(name, turn) for name in "ab" for turn in range(9, -1, -1)]
    assert len(set(asked)) == len(asked)
    assert early[0] == AT_ONCE * TURN < window, "the first bytes need not wait for a whole window"
    assert max(early) == window
    assert early[-1] == 0


def test_a_part_is_asked_for_from_its_first_byte_to_its_last(files: list[Path], asked: Asked) -> None:
    ahead = ReadAhead([Part(str(files[0]), 5, 3 * TURN + 7)])
    ahead.read(0)
    ahead.close()
    ends = [offset + nbytes for _, offset, nbytes in asked]
    assert [offset for _, offset, _ in asked] == [5, *ends[:-1]]
    assert ends[-1] == 5 + 3 * TURN + 7
    found = request_bytes(str(files[0]))
    assert 128 << 10 <= found <= TURN, "no device takes as much at once"
    assert {nbytes for *_, nbytes in asked[:-1]} == {found}
    assert request_bytes("/nowhere") == 128 << 10


def test_a_reader_that_is_ahead_asks_for_nothing_that_it_has(files: list[Path], asked: Asked) -> None:
    ahead = ReadAhead(parts(files))
    ahead.read(5 * TURN)
    ahead.close()
    assert asked[0][:2] == ("a", 4 * TURN), "five turns are read"


def test_readers_share_all_that_is_asked_for(files: list[Path], asked: Asked) -> None:
    by_reader = []
    for number in range(3):
        ahead = ReadAhead(parts(files), Share(number, 3), window=20 * TURN)
        for nbytes in (0, *[TURN] * 20):
            ahead.read(nbytes)
        ahead.close()
        by_reader.append(set(asked))
        asked.clear()
    everything = set.union(*by_reader)
    assert sum(map(len, by_reader)) == len(everything)
    assert total(list(everything)) == 20 * TURN
    assert all(total(list(each)) >= 6 * TURN for each in by_reader)


def test_files_that_cannot_be_asked_for_end_nothing(files: list[Path], monkeypatch: pytest.MonkeyPatch, asked: Asked) -> None:
    ahead = ReadAhead([Part("/nowhere", 0, TURN), *parts(files[:1])])
    ahead.read(TURN)
    assert asked[0][0] == "a"

    def refuses(*_: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(read_ahead.os, "posix_fadvise", refuses)
    for _ in range(10):
        ahead.read(TURN)
    ahead.close()

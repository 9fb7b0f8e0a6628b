"""The file cache of a checkpoint: which files are given back, and when."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from sglang_uvm_offload.files import page_cache
from sglang_uvm_offload.memory import host_pages

make_room = pytest.importorskip("sglang_uvm_offload.plugin.rank.host_memory", reason="needs SGLang").make_room

MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"1" * MIB)
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of the files that were given back."""
    found: list[int] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED), "all of the file"
        found.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(page_cache.os, "posix_fadvise", advise)
    return found


def refuses(*_: object) -> int:
    raise OSError(95, "Operation not supported")


def test_the_weights_are_given_back_and_no_other_file(
    checkpoint: Path, advised: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert page_cache.give_back(checkpoint) == 2 * MIB
    assert advised == [(checkpoint / f"model-{i}.safetensors").stat().st_ino for i in (1, 2)]
    monkeypatch.setattr(page_cache.os, "posix_fadvise", refuses)
    assert page_cache.give_back(checkpoint) == 0, "a file system that takes no advice ends nothing"


def test_a_file_is_cached_if_all_of_its_sample_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"1" * MIB)
    asked, missing = list[int](), list[int]()

    def read(descriptor: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT, "or it would wait for the disk"
        asked.append(offset)
        if offset in missing:
            raise BlockingIOError
        return len(buffers[0])

    monkeypatch.setattr(page_cache.os, "preadv", read)
    assert page_cache.is_cached([str(path)])
    assert (min(asked), max(asked), len(asked)) == (0, MIB - MIB // 64, 64)
    assert not page_cache.is_cached([str(path), str(tmp_path / "none")])
    missing.append(MIB // 2)
    assert not page_cache.is_cached([str(path)])
    monkeypatch.setattr(page_cache.os, "preadv", refuses)
    assert not page_cache.is_cached([str(path)])


def test_nothing_is_given_back_while_enough_is_free_in_large_pages(
    checkpoint: Path, advised: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (checkpoint / "buddyinfo").write_text("Node 0, zone Normal 9999 0 0 0 0 0 0 0 0 8 0\n")
    monkeypatch.setattr(host_pages, "BUDDYINFO", checkpoint / "buddyinfo")
    make_room(16 * MIB, [checkpoint])
    assert (advised, caplog.text) == ([], "")
    make_room(16 * MIB + 1, [checkpoint, checkpoint / "a name on the Hub"])
    assert len(advised) == 2
    assert "16.0 MiB of host RAM is free in blocks of 2 MiB" in caplog.text
    monkeypatch.setattr(host_pages, "BUDDYINFO", checkpoint / "none")
    make_room(1 << 60, [checkpoint])
    assert len(advised) == 2, "a kernel that does not show what is free"

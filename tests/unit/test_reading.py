"""Files of unknown origin: what is not a regular file is refused by each reader, at once, with what to do."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_uvm_offload.files import reading
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.safetensors_header import read_folder, read_header
from sglang_uvm_offload.report.html import is_report
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.resident_ids import ResidentIds
from sglang_uvm_offload.routing.merged_profile import load_for
from sglang_uvm_offload.routing.profile import Profile, is_profile
from sglang_uvm_offload.routing.trace import Trace, is_trace


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def substitution(path: Path) -> None:
    """As a shell's ``<(command)`` and ``/dev/stdin`` in a pipeline."""
    end, _ = os.pipe()
    path.symlink_to(f"/dev/fd/{end}")


SPECIAL: dict[Callable[[Path], None], str] = {
    os.mkfifo: "but a pipe; save its contents to a file",
    substitution: "but a pipe; save its contents to a file",
    bound_socket: "but a socket",
    lambda path: path.symlink_to("/dev/zero"): "but a device",
    Path.mkdir: "a folder",
}
READERS: dict[str, Callable[[Path], object]] = {
    "bytes": lambda path: reading.read(path, 10),
    "resident ids": lambda path: ResidentIds.parse(f"@{path}"),
    "profile": Profile.load,
    "trace": Trace.load,
    "is a profile": is_profile,
    "is a trace": is_trace,
    "is a report": is_report,
    "safetensors": read_header,
}


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_each_reader_refuses_what_is_no_regular_file(tmp_path, monkeypatch, special, reader):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    special(Path("it"))
    with pytest.raises((OSError, ValueError)) as caught:
        READERS[reader](Path("it"))
    assert SPECIAL[special] in str(caught.value)


@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (shape_of, "config.json"),
        (shape_of, "hf_quant_config.json"),
        (read_folder, "model.safetensors.index.json"),
        (read_folder, "model.safetensors"),
        (read_folder, "x.safetensors"),  # of an index
    ],
)
def test_a_models_folder_with_a_pipe_is_refused(tmp_path, reader, name):
    (tmp_path / "config.json").write_text("{}")
    if name.startswith("x"):
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: not a regular file but a pipe"):
        reader(tmp_path)


def test_an_index_that_was_not_downloaded_is_not_passed_over(tmp_path):
    (tmp_path / "model.safetensors.index.json").symlink_to("gone")
    with pytest.raises(ValueError, match=r"cannot read .*index.json: No such file"):
        read_folder(tmp_path)


def test_a_pipe_that_takes_the_place_of_a_file_is_refused_and_no_handle_is_left_open(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    found, opened = os.stat(tmp_path / "file"), len(os.listdir("/proc/self/fd"))
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "stat", lambda path: found)
    with pytest.raises(OSError, match="but a pipe"):
        reading.read(tmp_path / "pipe", 10)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_more_than_the_bound_is_refused_even_where_the_size_is_a_lie(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert reading.read(tmp_path / "file", 5) == b"12345"
    for path in (tmp_path / "file", "/proc/self/smaps"):  # whose size is 0 until it is read
        with pytest.raises(OSError, match="larger than"):
            reading.read(path, 4)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_what_cannot_be_a_path_is_an_os_error(path):
    with pytest.raises(OSError, match="not a path"):
        reading.read(path, 10)
    (problem,) = load_for("m", "a", [Path(path)]).problems
    assert "not a path" in problem
    with pytest.raises(FlagError):
        parse({"num_resident": 4, "profile": "a\0b"})


@pytest.mark.parametrize("path", ["a" * 5000, "/dev/null/a"])
def test_a_model_that_cannot_be_examined_is_refused(path):
    with pytest.raises(ValueError, match="cannot read"):
        shape_of(Path(path))


def test_text_of_several_lines_keeps_them_and_nothing_that_a_terminal_obeys():
    text = "one\ttwo\x1b[2J\r\n\x9b31m\x07\u202e\u2028 é漢 \udcff\x00"
    assert reading.printable_lines(text) == "one     two?[2J?\n?31m??? é漢 \udcff?"
    error = FlagError(["a\x1b[2J", "b\nc"])
    assert error.problems == ["a?[2J", "b\nc"]
    assert "\x1b" not in str(error)

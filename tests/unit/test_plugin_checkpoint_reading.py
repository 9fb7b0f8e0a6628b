"""A checkpoint that is read ahead gives the loader what SGLang's own iterator gives it."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from builders.launch import arguments
from safetensors import safe_open
from safetensors.torch import save_file
from sglang.srt.model_loader.loader import buffered_multi_thread_safetensors_weights_iterator as original

from sglang_uvm_offload.plugin.rank import checkpoint_reading
from sglang_uvm_offload.plugin.rank.checkpoint_reading import TOUCHED, around_threads, parts

pytestmark = pytest.mark.sglang

LOADER = {"max_workers": 8, "disable_mmap": False, "prefetch": False, "prefetch_num_threads": 4, "drop_cache_after_load": False}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Types of several sizes, which a file has in another order than names; one empty tensor; more than are touched early."""
    torch.manual_seed(0)
    types = itertools.cycle([torch.float32, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
    paths = []
    for number in range(3):
        tensors = {f"layers.{i}.{number}": torch.randn(3, 1000 + i).to(next(types)) for i in range(TOUCHED)}
        tensors[f"empty.{number}"] = torch.empty(0, 4)
        paths.append(str(tmp_path / f"model-{number}.safetensors"))
        save_file(tensors, paths[-1])
    return paths


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Fields of the launch."""
    fields: dict[str, str] = {}
    monkeypatch.setattr(checkpoint_reading, "get_server_args", lambda: arguments(**fields))
    monkeypatch.setattr(checkpoint_reading, "is_cached", lambda files: False)
    monkeypatch.setattr(checkpoint_reading, "get_world_group", lambda: SimpleNamespace(world_size=2, rank_in_group=1))
    return fields


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(
        (one[name].shape, one[name].dtype) == (other[name].shape, other[name].dtype)
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )


def test_names_order_and_bytes_are_those_of_sglangs_iterator(files: list[str]) -> None:
    assert same(dict(around_threads(None, files, **LOADER)), dict(original(files, **LOADER)))


def test_the_parts_are_the_tensors_in_the_order_in_which_they_come(files: list[str]) -> None:
    found = parts(files)
    for path in files:
        with safe_open(path, framework="pt") as opened, open(path, "rb") as raw:
            for name in opened.keys():  # noqa: SIM118 -- not a dict
                part = next(found)
                raw.seek(part.offset)
                assert part.path == path
                assert raw.read(part.nbytes) == bytes(opened.get_tensor(name).reshape(-1).view(torch.uint8).tolist())
    assert next(found, None) is None


@pytest.mark.parametrize("chosen", ["disable_mmap", "prefetch", "drop_cache_after_load"])
def test_a_launch_that_says_how_to_read_reads_so(chosen: str) -> None:
    assert around_threads(lambda files, **given: (files, given), ["a"], **{**LOADER, chosen: True}) == (
        ["a"],
        {**LOADER, chosen: True},
    )


def test_cached_files_are_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reading, "is_cached", lambda files: files == ["a"])
    assert around_threads(lambda files, **given: "threads", ["a"], **LOADER) == "threads"


def test_a_damaged_file_is_the_same_error(files: list[str]) -> None:
    data = Path(files[1]).read_bytes()
    Path(files[1]).write_bytes(data[: len(data) // 2])
    ends = []
    for iterator in (lambda: around_threads(None, files, **LOADER), lambda: original(files, **LOADER)):
        with pytest.raises(Exception) as end:  # noqa: PT011 -- whatever SGLang's is
            list(iterator())
        ends.append((type(end.value), str(end.value)))
    assert ends[0] == ends[1]


def test_a_loader_that_stops_early_leaves_no_thread(files: list[str]) -> None:
    weights = around_threads(None, files, **LOADER)
    next(weights)
    assert any(thread.name.startswith("checkpoint") for thread in threading.enumerate())
    weights.close()
    assert not any(thread.name.startswith("checkpoint") for thread in threading.enumerate())

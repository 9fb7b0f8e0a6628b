"""Digests of the code whose behaviour logs show, and what changes them."""

from __future__ import annotations

import pytest

from benchmarks.gpu import shown_code
from benchmarks.gpu.shown_code import CODE, KERNELS, ROOT

SOURCE = {path: (ROOT / path).read_text() for files in CODE.values() for path in files}
NOW = shown_code.digests()


def changed(path: str, old: str, new: str) -> set[str]:
    """The pieces whose digests differ with another text of one file."""
    assert old in SOURCE[path]
    then = shown_code.digests((SOURCE | {path: SOURCE[path].replace(old, new)}).__getitem__)
    return {name for name in CODE if then[name] != NOW[name]}


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        (KERNELS, "constexpr int slot_blocks = 32;", "constexpr int slot_blocks = 16;", {"slots"}),
        (KERNELS, "constexpr int copy_loads = 8;", "constexpr int copy_loads = 4;", {"brought", "copies", "link", "slots"}),
        (KERNELS, "found = find_piece(", "found = 1 + find_piece(", {"copies"}),
        (KERNELS, "int half_octaves(unsigned x) {", "int half_octaves(unsigned x) {\n    x++;", {"brought", "slots"}),
        (KERNELS, "arrived = read_now(from);", "arrived = 0;", {"read times"}),
        (KERNELS, "error = prefetch(address + span.offset", "error = prefetch(address", {"moves", "populating"}),
        (
            KERNELS,
            "int clamp(int x, int least, int most) { return",
            "int clamp(int x,  int least,\n int most) { // x\n return",
            set(),
        ),
        (KERNELS, "UVM_API int uvm_max_rows()", "UVM_API int uvm_most_rows()", set()),
        ("sglang_uvm_offload/cuda/read_times.py", "FAULT_CYCLES = 100_000", "FAULT_CYCLES = 10", {"read times"}),
        ("sglang_uvm_offload/cuda/read_times.py", '"""A first read with fewer cycles did not fault.', '"""Other words,', set()),
        ("sglang_uvm_offload/cuda/read_times.py", "FAULT_OVER_NEAR = 10", "FAULT_OVER_NEAR  =  10  # times", set()),
    ],
)
def test_only_the_code_that_a_piece_uses_changes_its_digest(path, old, new, expected):
    assert changed(path, old, new) == expected


def test_all_that_is_named_exists():
    named = [(path, name) for files in CODE.values() for path, names in files.items() for name in names]
    assert [(path, name) for path, name in named if f" {name}(" not in SOURCE[path]] == []

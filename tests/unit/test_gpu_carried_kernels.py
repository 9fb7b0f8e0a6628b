"""Kernels that were compiled on another machine: SGLang's own cache takes those of the same sources, and no others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.gpu import carried_kernels

pytestmark = pytest.mark.sglang
NAME = "sgl_kernel_jit_some_bf16_t"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Any:
    from sglang.kernels.jit.utils.compile import cache

    monkeypatch.setattr(cache, "find_prebuilt", cache.find_prebuilt)
    return cache


def compiled(cache: Any, folder: Path, source: bytes | None = None) -> Path:
    """A kernel as another machine leaves it, of one of SGLang's files, or of ``source`` in its place."""
    from sglang.kernels.jit.utils.compile.paths import KERNEL_PATH

    file = min(KERNEL_PATH.rglob("*.cuh"))
    entries = [
        cache._DepEntry("kernels", str(file.relative_to(KERNEL_PATH)), hashlib.sha256(source or file.read_bytes()).hexdigest()),
        cache._DepEntry("sys", "include/of_another_compiler.h", "0"),
    ]
    leaf = folder / NAME / "build-elsewhere" / "deps-0123456789abcdef"
    leaf.mkdir(parents=True)
    (leaf / "sgl_deps.json").write_bytes(msgspec.json.encode(entries))
    (leaf / f"{NAME}.so").touch()
    return leaf / f"{NAME}.so"


def test_a_kernel_of_the_same_sources_is_found_whatever_compiled_it(cache, tmp_path):
    kernel, scope = compiled(cache, tmp_path), tmp_path / NAME / "build-here"
    assert cache.find_prebuilt(scope=scope, module_name=NAME) is None, "SGLang alone would compile it again"
    carried_kernels.serve(cache)
    assert cache.find_prebuilt(scope=scope, module_name=NAME) == kernel
    assert cache.find_prebuilt(scope=tmp_path / "other" / "build-here", module_name="other") is None


@pytest.mark.parametrize("damage", ["another version's source", "no list"])
def test_a_kernel_of_other_sources_is_not(cache, tmp_path, damage):
    kernel = compiled(cache, tmp_path, b"of another version")
    if damage == "no list":
        (kernel.parent / "sgl_deps.json").unlink()
    carried_kernels.serve(cache)
    assert cache.find_prebuilt(scope=tmp_path / NAME / "build-here", module_name=NAME) is None

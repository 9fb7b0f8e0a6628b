"""What a server of the GPU session finds where a package is missing that SGLang only imports."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

USE = """
from flash_mla import one
from flash_mla.flash_mla_interface import Two
print("imported", flush=True)
one()
"""


@pytest.fixture
def modes() -> ModuleType:
    from benchmarks.gpu import modes_parts

    return modes_parts


@pytest.mark.sglang
def test_an_empty_package_is_imported_and_says_so_where_it_is_called(modes, tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "importable", lambda package: False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = modes.with_empty_packages(modes.MODES["drafts"], tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == "/elsewhere", "what is installed there comes first"
    ended = subprocess.run([sys.executable, "-c", USE], env=os.environ | env, capture_output=True, text=True)
    assert ended.stdout == "imported\n"
    assert "flash_mla is not installed here, and its one was called" in ended.stderr


@pytest.mark.sglang
def test_a_package_that_is_there_or_not_asked_for_is_left_alone(modes, tmp_path, monkeypatch):
    assert modes.with_empty_packages(modes.MODES["cache"], tmp_path) == {}
    monkeypatch.setattr(modes, "importable", lambda package: package == "flash_mla")
    assert modes.with_empty_packages(modes.MODES["drafts"], tmp_path) == {}
    assert not list(tmp_path.iterdir())

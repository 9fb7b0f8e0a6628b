"""What the servers of the GPU session's modes find: empty packages, and tile configurations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.sglang

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


def test_an_empty_package_is_imported_and_says_so_where_it_is_called(modes, tmp_path, monkeypatch):
    monkeypatch.setattr(modes, "importable", lambda package: False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = modes.with_empty_packages(modes.MODES["drafts"], tmp_path)
    assert env["PYTHONPATH"].split(os.pathsep)[0] == "/elsewhere", "what is installed there comes first"
    ended = subprocess.run([sys.executable, "-c", USE], env=os.environ | env, capture_output=True, text=True)
    assert ended.stdout == "imported\n"
    assert "flash_mla is not installed here, and its one was called" in ended.stderr


def test_a_package_that_is_there_or_not_asked_for_is_left_alone(modes, tmp_path, monkeypatch):
    assert modes.with_empty_packages(modes.MODES["cache"], tmp_path) == {}
    monkeypatch.setattr(modes, "importable", lambda package: package == "flash_mla")
    assert modes.with_empty_packages(modes.MODES["drafts"], tmp_path) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("down", [False, True])
def test_tiles_for_tma_have_the_name_by_which_sglang_looks_for_them(modes, tmp_path, monkeypatch, down):
    import torch
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_config_file_name

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H100 80GB HBM3")
    model = make_checkpoint("qwen3_moe", tmp_path / "model", expert_size=256)
    folder = Path(modes.with_tiles_for_tma(model)["SGLANG_MOE_CONFIG_DIR"])
    version = f"triton_{triton.__version__.replace('.', '_')}"
    tiles = json.loads((folder / "configs" / version / get_config_file_name(16, 256, None, down_moe=down)).read_text())
    assert tiles["1"]["USE_TMA"] is True

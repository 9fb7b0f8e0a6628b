"""The tile configurations that the servers of the GPU session's modes find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.make_checkpoint import make_checkpoint

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("down", [False, True])
def test_tiles_for_tma_have_the_name_by_which_sglang_looks_for_them(tmp_path, monkeypatch, down):
    import torch
    import triton
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_config_file_name

    from benchmarks.gpu import modes_parts as modes

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=0: "NVIDIA H100 80GB HBM3")
    model = make_checkpoint("qwen3_moe", tmp_path / "model", expert_size=256)
    folder = Path(modes.with_tiles_for_tma(model)["SGLANG_MOE_CONFIG_DIR"])
    version = f"triton_{triton.__version__.replace('.', '_')}"
    tiles = json.loads((folder / "configs" / version / get_config_file_name(16, 256, None, down_moe=down)).read_text())
    assert tiles["1"]["USE_TMA"] is True

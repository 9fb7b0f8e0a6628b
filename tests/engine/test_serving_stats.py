"""The statistics that a real server writes when it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import HOT, Checkpoints
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.server import offload_state
from sglang_uvm_offload.cli.main import main

PROMPT = {"text": "the quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
LOADING = {"launch", "build", "place experts", "read", "convert experts", "KV cache", "rest"}


def test_a_server_that_ends_leaves_its_statistics(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first experts are cold here, so the warm-up gains. Nothing is written before the end."""
    path = tmp_path / "stats.json"
    flags = {"expert_offload_num_resident": len(HOT[0]), "expert_offload_warmup_tokens": 16}
    checkpoint = checkpoints("qwen3_moe", hot=HOT, dtype="float32")
    with engines.server(checkpoint, expert_offload_stats=path, **flags) as server:
        for _ in range(2):
            server.post("/generate", PROMPT)
        shown = offload_state(server.get("/server_info"))
        log = server.log
        assert not path.exists()
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
    saved = json.loads(path.read_text())
    state = offload_state(saved)
    assert saved["model_path"] == str(checkpoint)
    assert state["tokens"] >= shown["tokens"]
    assert state["resident_ids"] == shown["resident_ids"]
    assert state["hit_rate_before"] < state["hit_rate"] < state["hit_rate_since"]
    start = {phase["name"]: phase for phase in state["start"]}
    assert set(start) >= LOADING
    assert start["place experts"]["nbytes"] == state["resident_bytes"] + state["offloaded_bytes"]
    assert start["read"]["nbytes"] > start["place experts"]["nbytes"], "attention and embeddings are read too"
    assert "rank 0: ready after" in log
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0, capsys.readouterr().err
    assert "place experts" in (tmp_path / "page.html").read_text()

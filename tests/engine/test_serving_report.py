"""The report command on a real server, and on what was saved from it."""

from __future__ import annotations

import json
import time
from pathlib import Path

from builders.reports import words
from checkpoints import Checkpoints
from serving import Engines

from sglang_uvm_offload.cli.main import main


def test_a_report_of_a_running_server_is_that_of_its_info(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    generate = {"text": "hello world", "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}}
    offload = {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 8, "enable_metrics": False}
    with engines.server(checkpoints("glm4_moe", dtype="float32"), dtype="float32", **offload) as server:
        time.sleep(1.1)  # since the last sample, if there is one
        server.post("/generate", generate)
        info = server.get("/server_info")
        assert main(["report", server.url, "--out", str(tmp_path / "live.html")]) == 0
    (state,) = info["internal_states"]
    history, curve = state["expert_offload"]["history"], state["expert_offload"]["curve"]
    assert history["steps"][-1] == 41  # SGLang's own first step of one token is among them
    assert any(1 < steps < 41 for steps in history["steps"]), "nothing fed the history while the request was served"
    assert curve["decode_steps"] == 39
    assert curve["residents"][-1] == 16
    assert curve["uniform"][-1] == curve["global"][-1] == 1

    (tmp_path / "info.json").write_text(json.dumps(info))
    assert main(["report", str(tmp_path / "info.json"), "--out", str(tmp_path / "saved.html")]) == 0
    live, saved = (words((tmp_path / name).read_text()) for name in ("live.html", "saved.html"))
    for said in (live, saved):
        assert "16 of 32" in said
        assert f"{curve['activations']} activations in 39 decode steps" in said
        assert "frequency, warmup" in said
    assert f"source {server.url}" in live

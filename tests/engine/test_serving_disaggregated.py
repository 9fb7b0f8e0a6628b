"""Prefill and decode on two real servers, each with experts of its own that are offloaded."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from builders.plugins import saboteur
from checkpoints import Checkpoints
from serving import PROMPTS, TESTS, Engines

from scripts.harness.server import Server, free_port, offload_state

FLAGS: dict[str, Any] = {
    **{"dtype": "float32", "expert_offload_num_resident": 6, "expert_offload_warmup_tokens": 16},
    "expert_offload_stream_tokens": 8,
}
WITHOUT_GPU: dict[str, Any] = {"disaggregation_decode_retraction_backup": "cpu_tensor"}
"""The default pins host RAM by CUDA."""
TRANSFERS = "sys.path.insert(0, {tests!r})\nfrom builders import kv_files\nkv_files.install({folder!r})\n"


@pytest.mark.nightly
@pytest.mark.works("Launch", "prefill and decode on two servers (PD disaggregation)")
def test_two_servers_answer_as_one_does(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    expected = [answer.output_ids for answer in engines.baseline(checkpoint, dtype="float32").answers]
    env = saboteur(tmp_path, TRANSFERS.format(tests=str(TESTS), folder=str(tmp_path)))
    roles: dict[str, Any] = {"disaggregation_transfer_backend": "nixl", "disaggregation_bootstrap_port": free_port()}
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    answers, states = [], {}
    with (
        engines.server(checkpoint, env=env, disaggregation_mode="prefill", **roles, **FLAGS) as prefill,
        Server(checkpoint, env=env, disaggregation_mode="decode", **WITHOUT_GPU, **roles, **FLAGS) as decode,
    ):
        for room, prompt in enumerate(PROMPTS, 1):
            asked = {"text": prompt, "sampling_params": sampling, "bootstrap_host": "127.0.0.1", "bootstrap_room": room}
            sending = threading.Thread(target=prefill.post, args=("/generate", asked))
            sending.start()
            answers.append(decode.post("/generate", asked)["output_ids"])
            sending.join()
        for role, server in (("prefill", prefill), ("decode", decode)):
            server.wait_until_idle()
            states[role] = offload_state(server.get("/server_info"))
    assert answers == expected
    for state in states.values():
        assert state["fault"] is None
        assert state["offloaded_bytes"] > 0
        assert state["moves"] > 0, "residents are chosen from the routing of its own steps"
    assert states["prefill"]["streamed_bytes"] > 0 == states["decode"]["streamed_bytes"]

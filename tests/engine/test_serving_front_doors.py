"""SGLang's other servers: what of status, actions and metrics each has.

Each is started anew: some of them read variables of the launcher that a prepared process would have copied too early.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints

from scripts.harness.patience import patience
from scripts.harness.server import Server, free_port, offload_state

OFFLOAD: dict[str, Any] = {"dtype": "float32", "expert_offload_num_resident": 8, "enable_metrics": True}
METRIC = "sglang:expert_offload_resident_bytes"
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
pytestmark = [pytest.mark.nightly, pytest.mark.since("0.5.23", "these servers were tried with none that is older")]


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("glm4_moe", dtype="float32")


def assert_whole(server: Server) -> None:
    """Requests, status, actions and metrics."""
    assert len(server.post("/generate", {"text": "hello", "sampling_params": GREEDY})["output_ids"]) == 4
    assert server.get("/expert_offload")["ranks"][0]["num_experts"] == 32
    assert server.post("/expert_offload", {"action": "pause"})["ranks"][0]["paused"] is True
    assert METRIC in server.get_text("/metrics")


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=patience(60)) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def eventually(ready: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + patience(seconds)
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.5)


WHOLE = [
    pytest.param(
        "grpc_port", "Native gRPC server started", marks=pytest.mark.works("Launch", "--grpc-port: native gRPC beside HTTP")
    ),
    pytest.param("enable_http2", "Granian", marks=pytest.mark.works("Launch", "--enable-http2 (Granian)")),
]


@pytest.mark.parametrize(("flag", "logged"), WHOLE)
def test_everything_is_served(flag: str, logged: str, checkpoint: Path) -> None:
    if flag == "enable_http2":
        pytest.importorskip("granian", reason="needs sglang[http2]")
    with Server(checkpoint, **{flag: True if flag == "enable_http2" else free_port()}, **OFFLOAD) as server:
        assert_whole(server)
        assert logged in server.log


@pytest.mark.works("Launch", "SGLANG_RUST_SERVER=1, without status and actions")
def test_the_rust_server_has_the_metrics_alone(checkpoint: Path) -> None:
    with Server(checkpoint, env={"SGLANG_RUST_SERVER": "1"}, **OFFLOAD) as server:
        answer = server.post("/generate", {"text": "hello", "sampling_params": GREEDY})
        assert answer["meta_info"]["completion_tokens"] == 4
        assert status_of(f"{server.url}/expert_offload") == 404
        assert offload_state(server.get("/server_info")) == {}
        assert METRIC in server.get_text("/metrics")


@pytest.mark.works("Launch", "--smg-grpc-mode, without status and actions")
def test_the_smg_server_has_the_metrics_on_its_sidecar(checkpoint: Path) -> None:
    pytest.importorskip("smg_grpc_servicer", reason="needs smg-grpc-servicer[sglang]")
    server = Server(checkpoint, smg_grpc_mode=True, smg_http_sidecar_port=(port := free_port()), **OFFLOAD)
    server.wait_until_ready = lambda deadline: eventually(lambda: "The server is fired up" in server.log)  # type: ignore[method-assign]
    with server:
        sidecar = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{sidecar}/metrics", timeout=patience(60)) as answer:
            assert METRIC in answer.read().decode()
        assert status_of(f"{sidecar}/expert_offload") == 404

"""What a real server records: the trace, which is what SGLang itself returns as each answer's experts, the residents that
follow from it, its statistics, and reports of these."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.plugins import IN_SCHEDULER, saboteur
from builders.reports import words
from checkpoints import HOT, Checkpoints
from launches import launched
from nursery import Nursery
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.server import Server, offload_state
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.files.autosave import PAUSE_SECONDS
from sglang_uvm_offload.routing.trace import Trace

ARGUMENTS: dict[str, Any] = {
    "max_running_requests": 3,
    "enable_return_routed_experts": True,
    "expert_offload_num_resident": len(HOT[0]),
    "expert_offload_warmup_tokens": 16,
}
# SGLang keeps the experts that it returns in host memory which it registers with CUDA, on a CPU too.
UNREGISTERED = (
    f"{IN_SCHEDULER}    from sglang.srt.mem_cache.pool_host import common\n"
    "    common._cuda_host_register = lambda *_, **__: None\n"
)
TOGETHER = [(f"{number} bottles of beer", 5 + 3 * number) for number in range(5)]
LOADING = {"launch", "build", "place experts", "read", "convert experts", "KV cache", "rest"}


def decoded_experts(answer: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """``ids[token, MoE layer, k]`` of an answer's decode steps, as SGLang returns them: the prompt's last token gives the first
    token of the output, which each decode step takes up from there."""
    meta = answer["meta_info"]
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    ids = ids.reshape(meta["prompt_tokens"] + meta["completion_tokens"] - 1, config["num_hidden_layers"], -1)
    return ids[meta["prompt_tokens"] :, config["first_k_dense_replace"] :]


def ask(server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return server.post("/generate", {"text": prompt, "sampling_params": sampling, "return_routed_experts": True})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def served(checkpoints: Checkpoints, engines: Engines, folder: Path) -> dict[str, Any]:
    """A server that answered requests together, paused, answered another one, was reported on, and was told to end."""
    checkpoint = checkpoints("glm4_moe", hot=HOT)  # its first layer does not route
    path, stats = folder / "trace.npz", folder / "stats.json"
    records = {"expert_offload_trace": path, "expert_offload_stats": stats}
    with engines.server(checkpoint, env=saboteur(folder, UNREGISTERED), **ARGUMENTS, **records) as server:
        with ThreadPoolExecutor(len(TOGETHER)) as clients:
            answers = list(clients.map(lambda request: ask(server, *request), TOGETHER))
        deadline = time.monotonic() + PAUSE_SECONDS + patience(20)
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        in_the_pause = Trace.load(path)
        answers.append(ask(server, "one more", 40))
        assert main(["report", server.url, "--out", str(folder / "live.html")]) == 0
        assert not stats.exists(), "nothing is written before the end"
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
        said = {"log": server.log, "url": server.url}
    config = json.loads((checkpoint / "config.json").read_text())
    experts = [decoded_experts(answer, config) for answer in answers]
    return {**said, "trace": path, "in_the_pause": in_the_pause, "experts": experts, "stats": json.loads(stats.read_text())}


def requests_of(trace: Trace) -> list[list[Any]]:
    """Each request's ids, in an order that does not depend on which began first."""
    return sorted(part.tolist() for part in np.split(trace.ids, np.cumsum(trace.seq_len)[:-1]))


def test_each_decoded_token_of_each_request_is_recorded_as_sglang_returns_it(served):
    trace = Trace.load(served["trace"])
    assert trace.num_experts == 16
    assert sorted(trace.seq_len) == sorted([tokens - 1 for _, tokens in TOGETHER] + [39])
    assert requests_of(trace) == sorted(ids.tolist() for ids in served["experts"])
    assert requests_of(served["in_the_pause"]) == sorted(ids.tolist() for ids in served["experts"][:-1])
    assert served["log"].count("requests saved to") == 2, "in the pause, and at the end"


def test_the_replay_command_reads_the_trace(served, capsys):
    assert main(["replay", str(served["trace"]), "--residency", "0.5", "--policy", "static", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert 0 < result["hit_rate"] < 1


def test_the_hot_experts_of_each_layer_end_up_resident(served):
    """As SGLang counts them. The first experts are cold, so the warm-up gains."""
    counts = [np.bincount(ids.ravel(), minlength=16) for ids in np.concatenate(served["experts"]).swapaxes(0, 1)]
    most_used = [sorted(np.argsort(-layer, kind="stable")[: len(HOT[0])].tolist()) for layer in counts]
    assert most_used == HOT[1:], "the checkpoint is not skewed as it should be"
    state = offload_state(served["stats"])
    assert [sorted(ids) for ids in state["resident_ids"]] == most_used
    assert state["hit_rate_before"] < state["hit_rate"] < state["hit_rate_since"]


def test_a_server_that_ends_leaves_its_statistics(served):
    assert served["stats"]["model_path"]
    state = offload_state(served["stats"])
    start = {phase["name"]: phase for phase in state["start"]}
    assert set(start) >= LOADING
    assert start["place experts"]["nbytes"] == state["resident_bytes"] + state["offloaded_bytes"]
    assert start["read"]["nbytes"] > start["place experts"]["nbytes"], "attention and embeddings are read too"
    assert "rank 0: ready after" in served["log"]


def test_a_report_of_a_running_server_is_that_of_its_statistics(served, folder):
    assert main(["report", str(folder / "stats.json"), "--out", str(folder / "saved.html")]) == 0
    history, curve = (offload_state(served["stats"])[name] for name in ("history", "curve"))
    assert len(history["steps"]) > 2, "nothing fed the history while requests were served"
    assert history["steps"] == sorted(history["steps"])
    assert (curve["residents"][-1], curve["uniform"][-1], curve["global"][-1]) == (16, 1, 1)
    live, saved = (words((folder / name).read_text()) for name in ("live.html", "saved.html"))
    for said in (live, saved):
        assert "12 of 32" in said
        assert f"{curve['activations']} activations in {curve['decode_steps']} decode steps" in said
        assert "frequency, warmup" in said
    assert f"source {served['url']}" in live
    assert "place experts" in (folder / "saved.html").read_text()


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "alone": ([], []),
    "parts": (["--tp-size", "2", "--ep-size", "2", "--pp-size", "2"], ["--ep-size 2", "--pp-size 2"]),
    "dp attention": (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], ["--enable-dp-attention / --attn-dp-size"]),
    "speculation": (["--speculative-algorithm", "NGRAM"], ["--speculative-algorithm NGRAM"]),
}


def test_a_launch_in_which_no_rank_sees_each_decoded_token_is_refused_by_name(
    checkpoints: Checkpoints, sglang: Nursery, tmp_path: Path
) -> None:
    flags = ["--model-path", str(checkpoints("qwen3_moe")), "--device", "cpu", "--expert-offload-num-resident", "4"]
    flags += ["--expert-offload-config", json.dumps({"trace": str(tmp_path / "trace.npz")})]
    ended = launched({name: {"argv": [*flags, *more], "resolve": True} for name, (more, _) in REFUSED.items()}, sglang)
    for case, (_, names) in REFUSED.items():
        assert ended[case]["exit"] == (2 if names else None), ended[case]["error"]
        for name in names:
            assert f"{name}: cannot be combined with --expert-offload-config trace" in ended[case]["error"]

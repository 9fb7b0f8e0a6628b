"""A real server that records: the trace is what SGLang itself returns as each answer's experts, token by token."""

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
from checkpoints import Checkpoints
from launches import launched
from nursery import Nursery
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.server import Server
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.files.autosave import PAUSE_SECONDS
from sglang_uvm_offload.routing.trace import Trace

ARGUMENTS: dict[str, Any] = {
    "max_running_requests": 3,
    "enable_return_routed_experts": True,
    "expert_offload_num_resident": 8,
    "expert_offload_warmup_tokens": 16,
}
# SGLang keeps the experts that it returns in host memory which it registers with CUDA, on a CPU too.
UNREGISTERED = (
    f"{IN_SCHEDULER}    from sglang.srt.mem_cache.pool_host import common\n"
    "    common._cuda_host_register = lambda *_, **__: None\n"
)
TOGETHER = [(f"{number} bottles of beer", 5 + 3 * number) for number in range(5)]


def decoded_experts(answer: dict[str, Any], config: dict[str, Any]) -> np.ndarray:
    """``ids[token, MoE layer, k]`` of an answer's decode steps, as SGLang returns them: the prompt's last token gives the first
    token of the output, which each decode step takes up from there."""
    meta = answer["meta_info"]
    ids = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    ids = ids.reshape(meta["prompt_tokens"] + meta["completion_tokens"] - 1, config["num_hidden_layers"], -1)
    return ids[meta["prompt_tokens"] :, config.get("first_k_dense_replace", 0) :]


def ask(server: Server, prompt: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return server.post("/generate", {"text": prompt, "sampling_params": sampling, "return_routed_experts": True})


def wait_for(path: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert path.exists()


@pytest.fixture(scope="module")
def served(checkpoints: Checkpoints, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A server that answered requests together, paused, answered another one, and was told to end."""
    checkpoint = checkpoints("glm4_moe")  # its first layer does not route
    folder = tmp_path_factory.mktemp("trace")
    path = folder / "trace.npz"
    with engines.server(checkpoint, env=saboteur(folder, UNREGISTERED), **ARGUMENTS, expert_offload_trace=path) as server:
        with ThreadPoolExecutor(len(TOGETHER)) as clients:
            answers = list(clients.map(lambda request: ask(server, *request), TOGETHER))
        wait_for(path, PAUSE_SECONDS + patience(20))
        in_the_pause = Trace.load(path)
        answers.append(ask(server, "one more", 9))
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
        log = server.log
    config = json.loads((checkpoint / "config.json").read_text())
    expected = [decoded_experts(answer, config) for answer in answers]
    return {"path": path, "expected": expected, "in_the_pause": in_the_pause, "log": log, "experts": 16}


def requests_of(trace: Trace) -> list[list[Any]]:
    """Each request's ids, in an order that does not depend on which began first."""
    return sorted(part.tolist() for part in np.split(trace.ids, np.cumsum(trace.seq_len)[:-1]))


def test_each_decoded_token_of_each_request_is_recorded_as_sglang_returns_it(served):
    trace = Trace.load(served["path"])
    assert trace.num_experts == served["experts"]
    assert sorted(trace.seq_len) == sorted([tokens - 1 for _, tokens in TOGETHER] + [8])
    assert requests_of(trace) == sorted(ids.tolist() for ids in served["expected"])


def test_a_pause_saves_and_so_does_the_end(served):
    assert requests_of(served["in_the_pause"]) == sorted(ids.tolist() for ids in served["expected"][:-1])
    assert served["log"].count("requests saved to") == 2


def test_the_replay_command_reads_it(served, capsys):
    assert main(["replay", str(served["path"]), "--residency", "0.5", "--policy", "static", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert 0 < result["hit_rate"] < 1


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "alone": ([], []),
    "parts": (["--tp-size", "2", "--ep-size", "2", "--pp-size", "2"], ["--ep-size 2", "--pp-size 2"]),
    "dp attention": (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], ["--enable-dp-attention / --attn-dp-size"]),
    "speculation": (["--speculative-algorithm", "NGRAM"], ["--speculative-algorithm NGRAM"]),
}


@pytest.fixture(scope="module")
def launch(checkpoints: Checkpoints, sglang: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang's own argument code did with each case."""
    flags = ["--model-path", str(checkpoints("qwen3_moe")), "--device", "cpu", "--expert-offload-num-resident", "4"]
    flags += ["--expert-offload-config", json.dumps({"trace": str(tmp_path_factory.mktemp("launches") / "trace.npz")})]
    return launched({name: {"argv": [*flags, *more], "resolve": True} for name, (more, _) in REFUSED.items()}, sglang)


@pytest.mark.parametrize("case", REFUSED)
def test_a_launch_in_which_no_rank_sees_each_decoded_token_is_refused_by_name(case, launch):
    names = REFUSED[case][1]
    assert launch[case]["exit"] == (2 if names else None), launch[case]["error"]
    for name in names:
        assert f"{name}: cannot be combined with --expert-offload-config trace" in launch[case]["error"]

"""A real server told what to do: two data-parallel replicas behind two HTTP processes, each of which may get the request."""

from __future__ import annotations

import json
import urllib.error
from typing import Any

import pytest
from checkpoints import HOT, Checkpoints
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.server import Server
from sglang_uvm_offload.plugin.since import VERSION
from sglang_uvm_offload.routing.profile import Profile

PROMPT = {"text": "the quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
# Two processes that import SGLang at once may take longer than uvicorn's ten seconds to say that they live.
PATIENT = {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": f"{patience(300):.0f}"}
# An older SGLang loads no plugins in them, and more than one is refused.
HTTP_PROCESSES = 2 if VERSION >= (0, 5, 23) else 1
Status = dict[str, Any]


def tell(server: Server, action: str) -> list[Status]:
    return server.post("/expert_offload", {"action": action})["ranks"]


@pytest.fixture(scope="module")
def said(checkpoints: Checkpoints, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Status:
    """What the server answered, step by step."""
    folder = tmp_path_factory.mktemp("state")
    path = folder / "profile.npz"
    arguments: dict[str, Any] = {"expert_offload_num_resident": len(HOT[0]), "expert_offload_warmup_tokens": 24}
    arguments |= {"expert_offload_save_profile": path, "dp_size": 2, "tokenizer_worker_num": HTTP_PROCESSES}
    checkpoint = checkpoints("qwen3_moe", hot=HOT, dtype="float32")
    said: Status = {}
    with engines.server(checkpoint, env=PATIENT, **arguments) as server:
        said["asked"] = [server.get("/expert_offload") for _ in range(8)]
        said["pause"] = tell(server, "pause")
        said["answers"] = [server.post("/generate", PROMPT)["output_ids"] for _ in range(6)]
        said["while paused"] = server.get("/expert_offload")["ranks"]
        said["resume"] = tell(server, "resume")
        said["readvise"] = tell(server, "readvise")
        said["answers"] += [server.post("/generate", PROMPT)["output_ids"] for _ in range(2)]
        said["save"] = tell(server, "save")
        said["profile"] = Profile.load(path)
        for _ in range(2):  # one for each replica: whichever saves has something new
            server.post("/generate", PROMPT)
        path.unlink()
        folder.rename(folder.with_name("gone"))
        with pytest.raises(urllib.error.HTTPError) as error:
            tell(server, "save")
        said["save to nowhere"] = error.value.code, json.loads(error.value.read())["error"]
        said["log"] = server.log
    return said


@pytest.mark.since("0.5.23", "its HTTP processes load no plugins where there are several, which is refused")
def test_every_http_process_answers_with_all_replicas(said: Status) -> None:
    for status in said["asked"]:
        assert [rank["rank"]["dp"] for rank in status["ranks"]] == [0, 1]
        assert all(rank["offloaded_experts"] > 0 for rank in status["ranks"])


def test_a_pause_holds_residents_on_all_replicas_through_the_warm_up(said: Status) -> None:
    assert [rank["paused"] for rank in said["pause"]] == [True, True]
    assert max(rank["tokens"] for rank in said["while paused"]) > 24
    assert [(rank["moves"], rank["warmup_done"]) for rank in said["while paused"]] == [(0, False)] * 2
    assert [rank["paused"] for rank in said["resume"]] == [False, False]


def test_residents_are_chosen_on_request_where_there_was_traffic(said: Status) -> None:
    served = [rank for rank in said["readvise"] if rank["warmup_done"]]
    assert served
    assert all(rank["fault"] is None for rank in served)
    assert all(
        sorted(ids) == hot for rank in said["save"] if rank["moves"] for ids, hot in zip(rank["resident_ids"], HOT, strict=True)
    )
    assert any(rank["moves"] for rank in said["save"])


@pytest.mark.works("Parallel", "DP 2 with --tokenizer-worker-num 2")
def test_answers_are_the_same_throughout(said: Status) -> None:
    assert len(said["answers"]) == 8
    assert all(answer == said["answers"][0] for answer in said["answers"])


def test_a_save_is_there_when_it_is_answered(said: Status) -> None:
    (saved,) = [save for rank in said["save"] for save in rank["saves"]]
    assert (saved["what"], saved["under_way"], saved["error"]) == ("profile", False, None)
    assert said["profile"].seen.routed().any()


def test_a_save_that_fails_says_why_and_the_server_serves_on(said: Status) -> None:
    code, reason = said["save to nowhere"]
    assert code == 500
    assert "No such file or directory" in reason
    assert "the profile could not be saved" in said["log"]


def test_the_log_says_what_was_asked_for_and_no_step_logs(said: Status) -> None:
    lines = [line for line in said["log"].splitlines() if "Expert offload:" in line]
    for action in ("pause", "resume", "readvise", "save"):
        assert any(f"{action} requested by an operator" in line for line in lines)
    assert len(lines) < 30

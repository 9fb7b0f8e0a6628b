"""What a client or an operator may ask of a server beyond a plain answer: the same comes of it with experts offloaded and
moving as without. Two servers with the same arguments get the same requests, one after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import openai
import pytest
from checkpoints import Checkpoints
from serving import Engines

from scripts.harness.server import Server, offload_state

pytestmark = pytest.mark.nightly
OFFLOAD: dict[str, Any] = {
    **{"expert_offload_num_resident": 6, "expert_offload_adapt": "continuous", "expert_offload_stream_tokens": 16},
    "expert_offload_slots": 2,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 400}
TEXT = "the quick brown fox jumps over the lazy dog"
SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
Asked = Callable[[Server], Any]


def generate(server: Server, text: str = TEXT, sampling: dict[str, Any] = GREEDY, **request: Any) -> Any:
    return server.post("/generate", {"text": text, "sampling_params": sampling, **request})


def answered(answer: dict[str, Any]) -> tuple[list[int], str]:
    return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]


def sampled(**sampling: Any) -> Asked:
    return lambda server: answered(generate(server, sampling={**GREEDY, "ignore_eos": False, **sampling}))


def top_logprobs(server: Server) -> Any:
    meta = generate(server, return_logprob=True, top_logprobs_num=3, logprob_start_len=0)["meta_info"]
    return [meta[f"{side}_top_logprobs"] for side in ("input", "output")]


def several(server: Server) -> Any:
    return [answered(answer) for answer in generate(server, sampling={**GREEDY, "n": 4})]


def conversation(server: Server) -> Any:
    """Three turns of a session, and a branch from the first."""
    session = server.post("/open_session", {"capacity_of_str_len": 4096})
    answers: list[Any] = []
    rids: list[str | None] = [None]
    for text, follows in (("hello", 0), (" world", 1), (" again", 2), (" otherwise", 1)):
        turn = generate(server, text, session_params={"id": session, "rid": rids[follows]})
        answers.append(answered(turn))
        rids.append(turn["meta_info"]["id"])
    server.open("/close_session", {"session_id": session}).close()
    return answers


def paused(mode: str) -> Asked:
    """A long answer that is held in the middle; the server says of itself what it is asked for meanwhile."""

    def ask(server: Server) -> Any:
        answers: list[Any] = []
        asking = threading.Thread(target=lambda: answers.append(generate(server, sampling=LONG)))
        first = server.stream("/generate", {"text": TEXT[::-1], "sampling_params": LONG})
        next(first)  # it is under way
        asking.start()
        server.post("/pause_generation", {"mode": mode})
        assert "internal_states" in server.get("/server_info")
        server.post("/continue_generation", {})
        pieces = [piece["output_ids"] for piece in first]
        asking.join()
        if mode == "abort":  # how far they came is a race
            return answered(generate(server))
        return [answered(*answers), pieces[-1]]

    return ask


def aborted(server: Server) -> Any:
    """One request, then all; what is asked next is answered alike."""
    for target in ({"rid": "one"}, {"abort_all": True}):
        stream = server.stream("/generate", {"text": TEXT, "sampling_params": LONG, "rid": "one"})
        next(stream)
        server.open("/abort_request", target).close()
        *_, last = stream
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
    return answered(generate(server))


def chats(server: Server) -> list[str]:
    """32 streams at once, by OpenAI's client."""

    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        said: dict[str, Any] = {"role": "user", "content": f"{number} bottles of beer on the wall"}
        more: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        stream = await client.chat.completions.create(model="default", messages=[said], stream=True, **more)  # type: ignore[list-item]
        return "".join([event.choices[0].delta.content or "" async for event in stream])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    return asyncio.run(all_at_once())


def under_load(server: Server) -> Any:
    """The server's own state and health while it answers; then the answers."""
    with ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(generate, server, f"{TEXT} {number}", LONG, priority=number % 3) for number in range(8)]
        for path in ("/health_generate", "/health", "/server_info", "/model_info"):
            server.open(path).close()
        return [answered(answer.result()) for answer in answers]


def profiled(server: Server) -> Any:
    """An answer while PyTorch's profiler notes each operator."""
    folder = server.folder / "profiled"
    server.open("/start_profile", {"output_dir": str(folder), "activities": ["CPU"]}).close()
    answer = answered(generate(server))
    server.open("/stop_profile", {}).close()
    assert list(folder.iterdir())
    return answer


def checksums(server: Server) -> Any:
    """SGLang's checksum of every tensor; experts have moved by now."""
    server.wait_until_idle()
    return server.post("/weights_checker", {"action": "checksum"})


ASKED: dict[str, dict[str, Asked]] = {
    "log-probabilities of the top tokens": {"top": top_logprobs},
    "JSON schema and regular expressions": {
        "schema": sampled(json_schema=SCHEMA, max_new_tokens=40),
        "regex": sampled(regex="(fox|dog) [0-9]{3}"),
    },
    "penalties, biases and minimal lengths": {
        "penalties": sampled(frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.2),
        "bias": sampled(logit_bias={"70": 50.0}),
        "least": sampled(min_new_tokens=6),
    },
    "several answers to one prompt (n)": {"several": several},
    "hidden states": {"hidden": lambda server: generate(server, return_hidden_states=True)["meta_info"]["hidden_states"]},
    "sessions": {"conversation": conversation},
    "pausing and continuing": {mode: paused(mode) for mode in ("in_place", "retract", "abort")},
    "aborting one request and all": {"aborted": aborted},
    "32 chats streamed at once": {"chats": chats},
    "health and state under load": {"under load": under_load},
    "SGLang's profiler": {"profiled": profiled},
    "the weights checker": {"checksums": checksums},
}
COMMON: dict[str, Any] = {"dtype": "float32", "enable_return_hidden_states": True}
SCHEDULED: dict[str, dict[str, Any]] = {
    "overlap scheduling, priorities": {"disable_overlap_schedule": False, "enable_priority_scheduling": True},
    "no radix cache, longest output first, chunks of 16 mixed with decoding": {
        **{"disable_radix_cache": True, "schedule_policy": "lof", "chunked_prefill_size": 16, "enable_mixed_chunk": True},
    },
}


def ask(server: Server) -> dict[str, Any]:
    said = {what: {name: request(server) for name, request in requests.items()} for what, requests in ASKED.items()}
    return {**said, "state": offload_state(server.get("/server_info"))}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", dtype="float32")


@pytest.fixture(scope="module", params=SCHEDULED)
def pair(request: pytest.FixtureRequest, checkpoint: Path, engines: Engines) -> list[dict[str, Any]]:
    said = []
    for flags in ({}, OFFLOAD):
        with engines.server(checkpoint, **COMMON, **SCHEDULED[request.param], **flags) as server:
            said.append(ask(server))
    return said


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.works("Requests", what)) for what in ASKED])
def test_what_is_asked_is_answered_alike(what: str, pair: list[dict[str, Any]]) -> None:
    off, on = pair
    assert on[what] == off[what]
    assert all(on[what].values())


@pytest.mark.works("Requests", "overlap scheduling, priorities, no radix cache, longest output first, chunks of 16")
def test_experts_moved_meanwhile(pair: list[dict[str, Any]]) -> None:
    _, on = pair
    state = on["state"]
    assert state["offloaded_bytes"] > 0
    assert state["moves"] > 0
    assert state["streamed_bytes"] > 0
    assert state["fault"] is None


@pytest.mark.works("Launch", "--api-key")
def test_a_key_guards_the_plugins_routes_too(checkpoint: Path, engines: Engines) -> None:
    with engines.server(checkpoint, api_key="secret", admin_api_key="admin", **OFFLOAD) as server:
        for path, body in (("/generate", {"text": TEXT}), ("/expert_offload", None)):
            with pytest.raises(HTTPError, match="401"):
                server.open(path, body)


@pytest.mark.works("Launch", "--load-format dummy")
def test_dummy_weights_are_those_without_offloading(checkpoint: Path, engines: Engines) -> None:
    flags: dict[str, Any] = {"load_format": "dummy", "dtype": "float32"}
    on = engines.run(checkpoint, **flags, expert_offload_num_resident=6)
    assert on.offload["offloaded_bytes"] > 0
    assert [answer.output_ids for answer in on.answers] == [
        answer.output_ids for answer in engines.run(checkpoint, **flags).answers
    ]

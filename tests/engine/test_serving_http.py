"""Real servers over HTTP: what clients are answered with experts offloaded is what they are answered without.

Two servers with the same arguments, one after the other, get the same requests; each test compares their answers. The one that
offloads is ``sglang serve`` with a YAML file, the other ``python -m sglang.launch_server`` with flags. Both compute in float32,
because concurrent requests are batched as they arrive and bfloat16 would show it.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders.hostile import Hostile
from checkpoints import Checkpoints
from serving import Engines, assert_close, assert_offloaded

from scripts.harness.patience import patience
from scripts.harness.server import Server, offload_state

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
OPENAI = {"model": "default", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
CHUNK = 64
METRIC = "sglang:expert_offload_"
ARGUMENTS: dict[str, Any] = {
    **{"dtype": "float32", "chunked_prefill_size": CHUNK, "enable_mixed_chunk": True, "enable_metrics": True}
}
OFFLOAD: dict[str, Any] = {
    **{"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 128, "expert_offload_stream_tokens": 16}
}
LONG = "".join(f"line {number}: the quick brown fox\n" for number in range(10))
Said = dict[str, Any]


def ask(server: Server) -> Said:
    """Everything a client may ask for, in an order in which each answer depends on no race."""
    chat = {**OPENAI, "messages": [{"role": "user", "content": "What is a fox?"}]}
    return {
        "generate": generate(server, "hello world"),
        "chat": server.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"],
        "completions": server.post("/v1/completions", {**OPENAI, "prompt": "once upon a time"})["choices"][0]["text"],
        "streamed": list(server.stream("/generate", {"text": "hello stream", "sampling_params": GREEDY})),
        "streamed_chat": list(server.stream("/v1/chat/completions", chat)),
        "unstreamed": generate(server, "hello stream"),
        "chunked": generate(server, LONG),
        "repeated": generate(server, LONG),
        "aborted": abort(server, LONG[::-1]),
        "after_abort": generate(server, LONG[::-1]),
        "concurrent": ask_together(server, [f"{number} bottles of beer on the wall" for number in range(32)]),
        "metrics": metrics(server),
        "server_info": server.get("/server_info"),
        "log": server.log,
    }


def generate(server: Server, text: str) -> dict[str, Any]:
    return server.post("/generate", {"text": text, "sampling_params": GREEDY, "return_logprob": True})


def metrics(server: Server) -> str:
    """With the first look for evicted residents, which comes after some seconds, as the next step publishes it."""
    deadline = time.monotonic() + patience(60)
    while METRIC + "moves" in (text := server.get_text("/metrics")) and METRIC + "evicted_bytes" not in text:
        assert time.monotonic() < deadline
        time.sleep(1)
        generate(server, "hello world")
    return text


def abort(server: Server, text: str) -> str:
    """The first piece of an answer, whose client then hangs up. A piece has as many tokens as are ready."""
    answer = server.stream("/generate", {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": 500}})
    piece = next(answer)["text"]
    answer.close()
    return piece


def ask_together(server: Server, prompts: list[str]) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as clients:
        return list(clients.map(lambda prompt: generate(server, prompt)["text"], prompts))


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("glm4_moe", dtype="float32")


@pytest.fixture(scope="module")
def off(checkpoint: Path, engines: Engines) -> Said:
    with engines.server(checkpoint, **ARGUMENTS) as server:
        return ask(server)


@pytest.fixture(scope="module")
def on(checkpoint: Path) -> Said:
    """Answers of a server started cold, by a user's command and file, in a folder with code under the names of libraries, as
    SECURITY.md says to start it there."""
    command = [str(Path(sys.executable).with_name("sglang")), "serve"]
    server = Server(checkpoint, command=command, config_file=True, env={"PYTHONSAFEPATH": "1"}, **ARGUMENTS, **OFFLOAD)
    hostile = Hostile(server.folder)
    with server:
        return {**ask(server), "ran": hostile.ran}


def test_no_code_of_the_folder_runs_in_which_a_server_starts(on: Said) -> None:
    assert on["ran"] == []


@pytest.mark.works("Launch", "sglang serve with a YAML file, /generate")
def test_generate_gives_the_same_tokens_and_logprobs(on: Said, off: Said) -> None:
    assert len(off["generate"]["output_ids"]) == 12
    assert on["generate"]["output_ids"] == off["generate"]["output_ids"]
    mine, theirs = ([logprob for logprob, *_ in said["generate"]["meta_info"]["output_token_logprobs"]] for said in (on, off))
    assert_close(mine, theirs, 0.0)


@pytest.mark.works("Launch", "OpenAI chat and completions")
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_openai_endpoints_give_the_same_text(endpoint: str, on: Said, off: Said) -> None:
    assert len(off[endpoint]) == 12
    assert on[endpoint] == off[endpoint]


def test_a_streamed_answer_arrives_in_pieces_and_is_the_whole_answer(on: Said, off: Said) -> None:
    for said in (on, off):
        assert len(said["streamed"]) > 1
        assert said["streamed"][-1]["text"] == said["unstreamed"]["text"]
    assert on["streamed"][-1]["text"] == off["streamed"][-1]["text"]


def test_a_streamed_chat_is_the_same_chat(on: Said) -> None:
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in on["streamed_chat"] if event["choices"]]
    assert "".join(pieces) == on["chat"]


@pytest.mark.works("Launch", "32 requests at once")
def test_32_concurrent_requests_are_answered_alike(on: Said, off: Said) -> None:
    assert len(set(off["concurrent"])) > 16, "the prompts are too much alike to tell answers apart"
    assert on["concurrent"] == off["concurrent"]


@pytest.mark.works("Launch", "long prompts in chunks, mixed with decoding")
def test_a_prompt_longer_than_a_chunk_is_answered_alike(on: Said, off: Said) -> None:
    assert on["chunked"]["meta_info"]["prompt_tokens"] > 4 * CHUNK
    assert on["log"].count(f"#new-token: {CHUNK},") >= 4, "the prompt was not prefilled in chunks"
    assert on["chunked"]["output_ids"] == off["chunked"]["output_ids"]


@pytest.mark.works("Launch", "radix cache")
def test_a_prefix_from_the_radix_cache_is_answered_alike(on: Said) -> None:
    assert on["chunked"]["meta_info"]["cached_tokens"] < CHUNK
    assert on["repeated"]["meta_info"]["cached_tokens"] > 4 * CHUNK
    assert on["repeated"]["output_ids"] == on["chunked"]["output_ids"]


def test_long_steps_streamed_and_short_ones_read_in_place(on: Said) -> None:
    state = offload_state(on["server_info"])
    assert state["streaming"]["buffers"] == 2
    assert state["streaming"]["min_tokens"] == 16
    assert state["streaming"]["fault"] is None
    assert state["streamed_bytes"] > 0
    assert state["zero_copy_bytes"] > 0
    assert "2 stream buffers, for steps of 16 tokens or more" in on["log"]


@pytest.mark.works("Launch", "a client that hangs up")
def test_a_prompt_whose_first_client_hung_up_is_answered_alike(on: Said, off: Said) -> None:
    shorter, longer = sorted((on["aborted"], off["aborted"]), key=len)
    assert shorter
    assert longer.startswith(shorter)
    assert on["after_abort"]["output_ids"] == off["after_abort"]["output_ids"]


def test_server_info_shows_the_flags_and_the_residency(on: Said, off: Said) -> None:
    assert_offloaded(on["server_info"])
    assert on["server_info"]["expert_offload_num_resident"] == "8"
    state = offload_state(on["server_info"])
    assert state["warmup_done"]
    assert 0 < state["hit_rate"] < 1
    assert state["evicted_bytes"] == 0
    assert offload_state(off["server_info"]) == {}


def test_metrics_stand_beside_those_of_sglang(on: Said, off: Said) -> None:
    assert "sglang:prompt_tokens_total" in on["metrics"]
    for name in ("resident_experts", "hit_rate", "zero_copy_bytes", "streamed_bytes", "moves", "evicted_bytes"):
        assert METRIC + name in on["metrics"]
    assert "sglang:prompt_tokens_total" in off["metrics"]
    assert "expert_offload" not in off["metrics"]


@pytest.mark.nightly
@pytest.mark.works("Launch", "--skip-tokenizer-init")
def test_token_ids_are_answered_without_a_tokenizer(checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint, answers = checkpoints("qwen3_moe", dtype="float32"), []
    for offload in ({}, {"expert_offload_num_resident": 4, "expert_offload_warmup_tokens": 8}):
        with engines.server(checkpoint, dtype="float32", skip_tokenizer_init=True, **offload) as server:
            answers.append(server.post("/generate", {"input_ids": [*range(60, 90)], "sampling_params": GREEDY})["output_ids"])
            info = server.get("/server_info")
    assert_offloaded(info)
    assert answers[0] == answers[1]
    assert len(answers[0]) == GREEDY["max_new_tokens"]

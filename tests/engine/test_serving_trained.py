"""A trained model, ``scripts/tiny``: its router sends each topic to experts of its own.

A server that offloads and follows the traffic and one that does not offload are asked the same: held-out texts of one topic,
each for the log-probabilities of its tokens and for more of it, and then those of the other topic. Residents are chosen on the
thread that launches steps, so they do not depend on the machine's speed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.plugins import IN_SCHEDULER, saboteur
from serving import Answer, Engines, assert_offloaded

from scripts.harness.patience import patience
from scripts.harness.server import Server, offload_state
from sglang_uvm_offload.routing.trace import Trace

TINY = Path(__file__).parents[2] / "scripts" / "tiny"
HELD_OUT: dict[str, list[str]] = json.loads((TINY / "held_out.json").read_text())
TOPICS = ("prose", "code")
BEGINNINGS = {"prose": "If the argument is", "code": "def __init__(self, "}
NEW_TOKENS = 48
EXPERTS, RESIDENT = 16, 6

DECIDED_BETWEEN_STEPS = (
    f"{IN_SCHEDULER}"
    "    from sglang_uvm_offload.plugin.rank.backend import Emulated\n"
    "    from sglang_uvm_offload.residency.mover import ThisThread\n"
    "    Emulated.executor = lambda self: ThisThread()\n"
)
Said = dict[str, Any]


def ask(server: Server) -> Said:
    """By topic: an answer to each held-out text and to the beginning of one, and the state of the experts after each."""
    said: Said = {}
    for topic in TOPICS:
        answers, states = [], []
        for text in [*HELD_OUT[topic], BEGINNINGS[topic]]:
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            body = {"text": text, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            answers.append(Answer.of(server.post("/generate", body)))
            states.append(server.get("/server_info"))
        said[topic] = {"answers": answers, "states": states}
    chat = {"model": "tiny", "temperature": 0, "max_tokens": NEW_TOKENS}
    asked = {"role": "user", "content": "Explain heapq."}
    said["chat"] = server.post("/v1/chat/completions", {**chat, "messages": [asked]})["choices"][0]["message"]["content"]
    return said


@pytest.fixture(scope="module")
def off(engines: Engines) -> Said:
    with engines.server(TINY) as server:
        return ask(server)


@pytest.fixture(scope="module")
def on(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Said:
    folder = tmp_path_factory.mktemp("trained")
    options = {
        "expert_offload_num_resident": RESIDENT,
        "expert_offload_warmup_tokens": 16,
        "expert_offload_adapt": "continuous",
        "expert_offload_trace": folder / "trace.npz",
    }
    with engines.server(TINY, env=saboteur(folder, DECIDED_BETWEEN_STEPS), **options) as server:
        said = ask(server)
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
    return {**said, "trace": Trace.load(folder / "trace.npz")}


@pytest.mark.nightly
def test_held_out_text_is_as_probable_with_offloading_to_the_last_bit(on: Said, off: Said) -> None:
    for topic in TOPICS:
        for mine, theirs in zip(on[topic]["answers"], off[topic]["answers"], strict=True):
            assert mine.input_logprobs == theirs.input_logprobs
            assert mine.output_logprobs == theirs.output_logprobs
            assert mine.output_ids == theirs.output_ids
        assert_offloaded(on[topic]["states"][-1])
        assert offload_state(on[topic]["states"][-1])["fault"] is None
        assert offload_state(off[topic]["states"][-1]) == {}
    assert on["chat"] == off["chat"]


@pytest.mark.nightly
@pytest.mark.parametrize("topic", TOPICS)
def test_held_out_text_is_probable(topic: str, off: Said) -> None:
    """A model that knows nothing has a perplexity of about the size of the vocabulary, 2048."""
    logprobs = [logprob for answer in off[topic]["answers"][:-1] for logprob in answer.input_logprobs[1:]]
    assert len(logprobs) > 400
    assert math.exp(-np.mean(logprobs)) < 2048 / 10


def by_topic(trace: Trace) -> dict[str, np.ndarray]:
    """``ids[token, layer, k]`` of the decoded tokens of each topic, without the chat."""
    parts = np.split(trace.ids, np.cumsum(trace.seq_len)[:-1])
    requests = [len(HELD_OUT[topic]) + 1 for topic in TOPICS]
    assert len(parts) == sum(requests) + 1
    return {
        "prose": np.concatenate(parts[: requests[0]]),
        "code": np.concatenate(parts[requests[0] : sum(requests)]),
    }


def served(ids: np.ndarray, residents: list[list[int]]) -> float:
    """The share of ``ids[token, layer, k]`` that ``residents``, by layer, hold."""
    return float(np.mean([np.isin(ids[:, layer], mine) for layer, mine in enumerate(residents)]))


def most_used(ids: np.ndarray) -> list[list[int]]:
    """The ``RESIDENT`` experts of each layer that ``ids[token, layer, k]`` name most often."""
    counts = [np.bincount(ids[:, layer].ravel(), minlength=EXPERTS) for layer in range(ids.shape[1])]
    return [np.argsort(-count, kind="stable")[:RESIDENT].tolist() for count in counts]


def test_each_topic_has_experts_of_its_own(on: Said) -> None:
    ids = by_topic(on["trace"])
    best = {topic: most_used(ids[topic]) for topic in TOPICS}
    for mine, other in (TOPICS, TOPICS[::-1]):
        assert served(ids[mine], best[mine]) > served(ids[mine], best[other]) + 0.2


def test_residents_follow_a_change_of_topic(on: Said) -> None:
    """Those that one topic left serve few tokens of the other, and those that follow it serve about what the best would."""
    code = by_topic(on["trace"])["code"]
    before, *_, after = ([offload_state(state) for state in on[topic]["states"]][-1] for topic in TOPICS)
    stale, best = served(code, before["resident_ids"]), served(code, most_used(code))
    followed = served_between(before, after)
    assert before["resident_ids"] != after["resident_ids"]
    assert followed > stale + 0.1, (stale, followed, best)


def served_between(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The hit rate of the decode steps between two states."""
    grown = {
        name: sum(layer[name] for layer in after["layers"]) - sum(layer[name] for layer in before["layers"])
        for name in ("activations", "activations_resident")
    }
    return grown["activations_resident"] / grown["activations"]

"""Mixed traffic for a server: the same requests each time, and what of an answer is compared."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any, NamedTuple

from scripts.harness.server import Server

DOMAINS = ("the weather in the north", "def f(x):\n    return x", "once upon a time in a far country", "1 2 3 4 5 6 7 8")
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
TOLERANCE = 1e-3
"""The largest difference between equal log-probabilities: a row is summed in another order in a batch than alone."""


class Request(NamedTuple):
    kind: str
    path: str
    body: dict[str, Any]


VARIANTS = 6
"""Requests of each domain and kind: more than a server's prefix cache holds, so that long prompts are prefilled again."""


def requests() -> list[Request]:
    """``VARIANTS`` requests of each kind for each domain, domain after domain."""
    made = []
    for words, variant in itertools.product(DOMAINS, range(VARIANTS)):
        domain = f"{variant} {words}"
        long = (domain + " ") * 12
        chat = {"model": "m", "messages": [{"role": "user", "content": domain}], "temperature": 0, "max_tokens": 8}
        made += [
            Request("short", "/generate", {"text": domain, "sampling_params": GREEDY}),
            Request("long", "/generate", {"text": long, "sampling_params": GREEDY}),
            Request("streamed", "/generate", {"text": domain + "?", "sampling_params": GREEDY}),
            Request("n", "/generate", {"text": domain, "sampling_params": {**GREEDY, "n": 2}}),
            Request("logprobs", "/generate", {"text": domain, "sampling_params": GREEDY, "return_logprob": True}),
            Request("regex", "/generate", {"text": domain, "sampling_params": {**GREEDY, "regex": "[a-c]{8}"}}),
            Request("json_schema", "/generate", {"text": domain, "sampling_params": {**GREEDY, "json_schema": SCHEMA}}),
            Request("completions", "/v1/completions", {"model": "m", "prompt": domain, "temperature": 0, "max_tokens": 8}),
            Request("chat", "/v1/chat/completions", chat),
            Request("aborted", "/generate", {"text": long, "sampling_params": {**GREEDY, "max_new_tokens": 200}}),
        ]
    return made


class Interrupted(ValueError):
    """An answer that the server began but did not complete."""


def answer(server: Server, request: Request) -> Any:
    """What is compared: texts, and log-probabilities. An aborted request has no answer. Raises ``Interrupted``, and what
    ``urllib`` does."""
    if request.kind in ("aborted", "streamed"):
        events = server.stream(request.path, request.body)
        if request.kind == "streamed":
            return _text([*events][-1:])[0][0]
        if sum(1 for _ in itertools.islice(events, 3)) < 3:
            raise Interrupted("fewer than three events")
        events.close()  # type: ignore[attr-defined]
        return None
    got = server.post(request.path, request.body)
    if "choices" in got:
        for choice in got["choices"]:
            _check(choice["finish_reason"])
        return [choice.get("text") or choice["message"]["content"] for choice in got["choices"]]
    return _text(got if isinstance(got, list) else [got])


def _text(answers: list[dict[str, Any]]) -> list[list[Any]]:
    """Each answer's text and the log-probabilities of its tokens."""
    if not answers:
        raise Interrupted("no event")
    for each in answers:
        _check((each["meta_info"]["finish_reason"] or {}).get("type"))
    return [[each["text"], each["meta_info"].get("output_token_logprobs")] for each in answers]


def _check(finish_reason: str | None) -> None:
    if finish_reason not in ("length", "stop"):
        raise Interrupted(f"an answer that ended by {finish_reason}")


def alike(mine: Any, theirs: Any) -> bool:
    """Whether two answers are the same, but for the last bits of log-probabilities."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, abs_tol=TOLERANCE)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(alike, mine, theirs))
    return mine == theirs

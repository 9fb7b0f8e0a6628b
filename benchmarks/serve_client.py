"""The requests to a server under measurement: the same token ids for all, greedy, to a fixed length, every wait bounded.

METHODS explains how each figure is measured. All times are seconds as this client sees them, over HTTP on the same machine.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import requests

METHODS = {
    "decode": "seconds per token of a batch whose answers are streamed: from when the first tokens have arrived to when the "
    "last have, over the tokens between, so without prefill; no request repeats; bytes and counts are of one more answer",
    "prefill": "seconds of one request for one new token: prefill, one sampled token and HTTP",
    "answers": "greedy token ids of single requests, one after the other, against the resident server's of the same repeat",
}

PromptIds = Callable[[int, int], list[int]]
"""The token ids of request number i, of a given length."""


STREAMED_EACH = 4
"""Requests of a batch up to which each token is sent at once: of more, the pieces would take SGLang longer than the step."""
NOT_RESOLVED = "not resolved"
"""How a failure begins that is of the clock's: the server has answered."""


class PointFailed(Exception):
    """The server did not answer, or sent another kind of answer. The message is one line."""


@dataclass(frozen=True)
class Client:
    """One server. ``seconds`` bounds each call."""

    url: str
    seconds: float

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt, which are sent as one batch."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        answers = self._call("/generate", {"input_ids": prompts, "sampling_params": sampling})
        found = [answer["output_ids"] for answer in answers]
        short = [len(ids) for ids in found if len(ids) != new_tokens]
        if short or len(found) != len(prompts):
            raise PointFailed(f"{len(prompts)} requests for {new_tokens} tokens: {len(found)} answers, of {short} tokens some")
        return found

    def streamed(self, prompts: list[list[int]], new_tokens: int, every: int = 1) -> Iterator[tuple[int, int]]:
        """The fewest and the most new tokens that any of the prompts has so far, as the pieces of their answers arrive, of
        ``every`` so many tokens. They are sent as one batch."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, "stream_interval": every}
        arrived = [0] * len(prompts)
        for piece in self._pieces("/generate", {"input_ids": prompts, "sampling_params": sampling, "stream": True}):
            if "error" in piece:
                raise PointFailed(_one_line(piece["error"]["message"]))
            arrived[piece.get("index", 0)] = piece["meta_info"]["completion_tokens"]
            yield min(arrived), max(arrived)
        if set(arrived) != {new_tokens}:
            raise PointFailed(
                f"{len(prompts)} requests for {new_tokens} tokens: streamed answers of {min(arrived)} to {max(arrived)}"
            )

    def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._call("/server_info", None)
        return info

    def state(self) -> dict[str, Any]:
        """What the first rank reports of itself."""
        states = self.server_info().get("internal_states") or [{}]
        first: dict[str, Any] = states[0]
        return first

    def offload(self) -> dict[str, Any]:
        """The plugin's status of its first rank; empty without it."""
        return self.state().get("expert_offload") or {}

    def _call(self, path: str, body: Any) -> Any:
        with self._answer(path, body) as answer:
            return answer.json()

    def _pieces(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Those of a stream of server-sent events, up to its end."""
        end = time.monotonic() + self.seconds
        with self._answer(path, body, stream=True) as answer:
            for line in answer.iter_lines():
                if time.monotonic() > end:
                    raise PointFailed(f"no whole answer within {self.seconds:g} s")
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield json.loads(line[len(b"data: ") :])

    @contextlib.contextmanager
    def _answer(self, path: str, body: Any, stream: bool = False) -> Iterator[requests.Response]:
        try:
            method = "POST" if body else "GET"
            with requests.request(method, self.url + path, json=body, timeout=self.seconds, stream=stream) as answer:
                if answer.status_code != 200:
                    raise PointFailed(f"HTTP {answer.status_code}: {_one_line(answer.text)}")
                yield answer
        except requests.Timeout:
            raise PointFailed(f"no answer within {self.seconds:g} s") from None
        except requests.RequestException as error:
            raise PointFailed(f"{type(error).__name__}: the server did not answer") from error


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def random_prompts(vocabulary: int, seed: int) -> PromptIds:
    """Request i is the same ids for whoever asks, and a longer one begins like a shorter one. Ids 0 (often the end of a text)
    and beyond 256 in small vocabularies of bytes are left out."""
    high = min(vocabulary, 257) if vocabulary <= 512 else vocabulary

    def ids(request: int, length: int) -> list[int]:
        return [int(each) for each in np.random.default_rng([seed, request]).integers(1, high, length)]

    return ids


@dataclass
class Timed:
    """Repeats of one figure. ``extra`` holds what else was seen meanwhile."""

    samples: list[float]
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The requests, the same for all contenders."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    prompt_tokens: int
    """Of each request of a decoded batch."""
    short: int
    """New tokens of an answer after which its steps are timed."""
    long: int
    samples: int
    answers: int
    """Single requests whose answers are compared."""
    answer_tokens: int
    warmup_tokens: int
    long_answers: tuple[int, ...] = ()
    """Prompts of further requests whose answers are compared."""

    @property
    def most_tokens(self) -> int:
        """The largest KV cache that any point needs."""
        decode = max(self.batches) * (self.prompt_tokens + self.long)
        return max(decode, max((*self.prompts, *self.long_answers), default=0) + self.answer_tokens)


def warm(client: Client, prompts: PromptIds, sizes: Sizes) -> int:
    """Ask for everything once, and decode until ``warmup_tokens`` have passed; the number of tokens that have. Points that a
    server refuses are left to their own rows."""
    tokens = 0

    def ask(batch: int, length: int, new: int) -> None:
        nonlocal tokens
        client.generate([prompts(request, length) for request in range(batch)], new)
        tokens += batch * (length + new - 1)

    refused = 0
    for batch, length in [*((b, sizes.prompt_tokens) for b in sizes.batches), *((1, p) for p in sizes.prompts)]:
        try:
            ask(batch, length, sizes.short)
        except PointFailed:
            refused += 1
    if refused == len(sizes.batches) + len(sizes.prompts):
        raise PointFailed("no warm-up request was answered")
    while tokens < sizes.warmup_tokens:
        ask(max(sizes.batches), sizes.prompt_tokens, sizes.long)
    ask(1, sizes.prompt_tokens, sizes.long)  # residents are chosen before the step that follows
    return tokens


Counters = Callable[[], dict[str, float]] | None
"""What the server has counted so far, such as the bytes of experts read over the link; None where it counts nothing."""


def timed(client: Client, prompts: list[list[int]], new: int, counters: Counters) -> dict[str, float]:
    """``seconds`` of one batch, and what was counted meanwhile. The counters are read outside the time."""
    before = counters() if counters else {}
    start = time.perf_counter()
    client.generate(prompts, new)
    seconds = time.perf_counter() - start
    after = counters() if counters else {}
    return {"seconds": seconds, **{name: after[name] - before[name] for name in before}}


def medians(figures: list[dict[str, float]]) -> Timed:
    """The seconds of all, the medians of the rest."""
    names = figures[0].keys() - {"seconds"}
    extra = {name: statistics.median(each[name] for each in figures) for name in sorted(names)}
    return Timed([each["seconds"] for each in figures], extra)


def decode(client: Client, prompts: PromptIds, batch: int, sizes: Sizes, counters: Counters = None) -> Timed:
    """Seconds a token of a batch, of streamed answers to requests that nothing asked before; what was counted in one step."""
    first = max(sizes.batches) + sum(each * (sizes.samples + 1) for each in sizes.batches if each < batch)

    def asked(sample: int) -> list[list[int]]:
        return [prompts(first + sample * batch + request, sizes.prompt_tokens) for request in range(batch)]

    samples = [step_seconds(client, asked(sample), sizes) for sample in range(sizes.samples)]
    if statistics.median(samples) <= 0:
        raise PointFailed(f"{NOT_RESOLVED}: {sizes.long} tokens came no later than {sizes.short}; ask for more with --tokens")
    return Timed(samples, step_counts(client, asked(sizes.samples), sizes, counters) if counters else {})


def step_seconds(client: Client, prompts: list[list[int]], sizes: Sizes) -> float:
    """From when all requests have ``short`` tokens to when the first one has all of its, over the tokens of each between."""
    steps: list[tuple[float, int]] = []
    together = True
    for least, most in client.streamed(prompts, sizes.long, 1 if len(prompts) <= STREAMED_EACH else sizes.short):
        if together and least >= sizes.short and (not steps or least > steps[-1][1]):
            steps.append((time.perf_counter(), least))  # the last of them has arrived
            together = most < sizes.long
    if len(steps) < 2:
        raise PointFailed(f"{NOT_RESOLVED}: the requests of a batch did not decode together")
    (begun, first), (ended, last) = steps[0], steps[-1]
    return (ended - begun) / (last - first)


def step_counts(
    client: Client, prompts: list[list[int]], sizes: Sizes, counters: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """What was counted a step, of decode steps alone: the counters are read amid an answer, which nothing times, and after it.
    Empty where no step was counted between."""
    before: dict[str, float] = {}
    for least, _ in client.streamed(prompts, sizes.long):
        if least and not before:  # all prompts are computed
            before = counters()
    after = counters()
    steps = after.pop("steps") - before.pop("steps")
    return {name: (after[name] - before[name]) / steps for name in before} if steps else {}


def prefill(client: Client, prompts: PromptIds, length: int, sizes: Sizes, counters: Counters = None) -> Timed:
    """Seconds of a prompt of ``length`` tokens and one new one, and what was counted."""
    return medians([timed(client, [prompts(sample, length)], 1, counters) for sample in range(sizes.samples)])


def answers(client: Client, prompts: PromptIds, sizes: Sizes) -> list[list[int]]:
    """The token ids that single requests of several lengths are answered with."""
    lengths = [max(1, sizes.prompt_tokens * (1 + request % 4) // 4) for request in range(sizes.answers)]
    asked = enumerate([*lengths, *sizes.long_answers])
    return [client.generate([prompts(1000 + i, length)], sizes.answer_tokens)[0] for i, length in asked]

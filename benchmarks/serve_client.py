"""Sends the measured requests: the same token ids to every server, greedy, fixed length, with a limit on every wait.

METHODS explains how each figure is measured. Times are seconds as this client sees them, over HTTP on the same machine.
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
"""Returns the token ids of request number i with a given length."""


STREAMED_EACH = 4
"""Up to this batch every token is streamed at once. With more requests, sending would take SGLang longer than the step."""
NOT_RESOLVED = "not resolved"
"""Prefix of failures to time an answer: the server did answer."""


class PointFailed(Exception):
    """The server did not answer, or answered with something unexpected. The message is one line."""


@dataclass(frozen=True)
class Client:
    """A client of one server. ``seconds`` limits each call."""

    url: str
    seconds: float

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Sends the prompts as one batch and returns the new token ids of each."""
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        answers = self._call("/generate", {"input_ids": prompts, "sampling_params": sampling})
        found = [answer["output_ids"] for answer in answers]
        short = [len(ids) for ids in found if len(ids) != new_tokens]
        if short or len(found) != len(prompts):
            raise PointFailed(f"{len(prompts)} requests for {new_tokens} tokens: {len(found)} answers, of {short} tokens some")
        return found

    def streamed(self, prompts: list[list[int]], new_tokens: int, every: int = 1) -> Iterator[tuple[int, int]]:
        """Sends the prompts as one batch and streams answers in pieces of ``every`` tokens. As pieces arrive, yields the fewest
        and the most new tokens of any prompt so far."""
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
        """The state that the first rank reports."""
        states = self.server_info().get("internal_states") or [{}]
        first: dict[str, Any] = states[0]
        return first

    def offload(self) -> dict[str, Any]:
        """The plugin's status on the first rank; empty without the plugin."""
        return self.state().get("expert_offload") or {}

    def _call(self, path: str, body: Any) -> Any:
        with self._answer(path, body) as answer:
            return answer.json()

    def _pieces(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """Yields the pieces of a stream of server-sent events."""
        end = time.monotonic() + self.seconds
        with self._answer(path, body, stream=True) as answer:
            for line in answer.iter_lines():
                if time.monotonic() > end:
                    raise PointFailed(f"no complete answer within {self.seconds:g} s")
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
    """Returns random but fixed prompts: request i always has the same ids, and a longer one starts with the shorter one. Leaves
    out id 0 (often end-of-text), and ids above 256 in small byte vocabularies."""
    high = min(vocabulary, 257) if vocabulary <= 512 else vocabulary

    def ids(request: int, length: int) -> list[int]:
        return [int(each) for each in np.random.default_rng([seed, request]).integers(1, high, length)]

    return ids


@dataclass
class Timed:
    """The repeats of one figure. ``extra`` holds what else was counted meanwhile."""

    samples: list[float]
    extra: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sizes:
    """The requests, the same for all contenders."""

    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    prompt_tokens: int
    """Prompt length of each request in a decode batch."""
    short: int
    """New tokens after which the steps of an answer are timed."""
    long: int
    samples: int
    answers: int
    """Number of single requests whose answers are compared."""
    answer_tokens: int
    warmup_tokens: int
    long_answers: tuple[int, ...] = ()
    """Prompt lengths of further requests whose answers are compared."""

    @property
    def most_tokens(self) -> int:
        """The largest KV cache that any point needs."""
        decode = max(self.batches) * (self.prompt_tokens + self.long)
        return max(decode, max((*self.prompts, *self.long_answers), default=0) + self.answer_tokens)


def warm(client: Client, prompts: PromptIds, sizes: Sizes) -> int:
    """Requests every size once, then decodes until ``warmup_tokens`` have passed. Returns how many tokens have. Sizes that the
    server refuses show in their own rows."""
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
    ask(1, sizes.prompt_tokens, sizes.long)  # residents are selected before the next step
    return tokens


Counters = Callable[[], dict[str, float]] | None
"""Returns the server's counters, such as bytes of experts read over the link; None if it counts nothing."""


def timed(client: Client, prompts: list[list[int]], new: int, counters: Counters) -> dict[str, float]:
    """Returns the ``seconds`` of one batch and what was counted meanwhile. Counters are read outside the timed interval."""
    before = counters() if counters else {}
    start = time.perf_counter()
    client.generate(prompts, new)
    seconds = time.perf_counter() - start
    after = counters() if counters else {}
    return {"seconds": seconds, **{name: after[name] - before[name] for name in before}}


def medians(figures: list[dict[str, float]]) -> Timed:
    """Keeps all seconds, and the medians of everything else."""
    names = figures[0].keys() - {"seconds"}
    extra = {name: statistics.median(each[name] for each in figures) for name in sorted(names)}
    return Timed([each["seconds"] for each in figures], extra)


def decode(client: Client, prompts: PromptIds, batch: int, sizes: Sizes, counters: Counters = None) -> Timed:
    """Times a batch per token, by streamed answers to requests that were never sent before, and counts one step."""
    first = max(sizes.batches) + sum(each * (sizes.samples + 1) for each in sizes.batches if each < batch)

    def asked(sample: int) -> list[list[int]]:
        return [prompts(first + sample * batch + request, sizes.prompt_tokens) for request in range(batch)]

    samples = [step_seconds(client, asked(sample), sizes) for sample in range(sizes.samples)]
    if statistics.median(samples) <= 0:
        raise PointFailed(f"{NOT_RESOLVED}: {sizes.long} tokens came no later than {sizes.short}; use more tokens")
    return Timed(samples, step_counts(client, asked(sizes.samples), sizes, counters) if counters else {})


def step_seconds(client: Client, prompts: list[list[int]], sizes: Sizes) -> float:
    """Returns seconds per step, from when all requests have ``short`` tokens to when the first one has all of its tokens."""
    steps: list[tuple[float, int]] = []
    together = True
    for least, most in client.streamed(prompts, sizes.long, 1 if len(prompts) <= STREAMED_EACH else sizes.short):
        if together and least >= sizes.short and (not steps or least > steps[-1][1]):
            steps.append((time.perf_counter(), least))  # every request has ``least`` tokens
            together = most < sizes.long
    if len(steps) < 2:
        raise PointFailed(f"{NOT_RESOLVED}: the requests of a batch did not decode together")
    (begun, first), (ended, last) = steps[0], steps[-1]
    return (ended - begun) / (last - first)


def step_counts(
    client: Client, prompts: list[list[int]], sizes: Sizes, counters: Callable[[], dict[str, float]]
) -> dict[str, float]:
    """Returns counts per decode step. The counters are read during an answer that is not timed, and after it. Empty if no step
    was counted between."""
    before: dict[str, float] = {}
    for least, _ in client.streamed(prompts, sizes.long):
        if least and not before:  # all prompts are prefilled
            before = counters()
    after = counters()
    steps = after.pop("steps") - before.pop("steps")
    return {name: (after[name] - before[name]) / steps for name in before} if steps else {}


def prefill(client: Client, prompts: PromptIds, length: int, sizes: Sizes, counters: Counters = None) -> Timed:
    """Times prompts of ``length`` tokens with one new token, and counts."""
    return medians([timed(client, [prompts(sample, length)], 1, counters) for sample in range(sizes.samples)])


def answers(client: Client, prompts: PromptIds, sizes: Sizes) -> list[list[int]]:
    """Returns the answers, as token ids, to single requests of several lengths."""
    lengths = [max(1, sizes.prompt_tokens * (1 + request % 4) // 4) for request in range(sizes.answers)]
    asked = enumerate([*lengths, *sizes.long_answers])
    return [client.generate([prompts(1000 + i, length)], sizes.answer_tokens)[0] for i, length in asked]

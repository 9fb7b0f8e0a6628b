"""What a served checkpoint of ``benchmarks.trace_checkpoint`` routed, token by token and layer by layer, against its walk.

SGLang itself records where each token was routed (``--enable-return-routed-experts``).
"""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import numpy as np
import requests

from benchmarks.trace_walk import Walk
from scripts.harness.patience import patience
from sglang_uvm_offload.routing.trace import Trace

PROMPT = 4


@dataclasses.dataclass(frozen=True)
class Answer:
    """One request: the tokens that were routed (all but the last one generated), and their experts."""

    tokens: np.ndarray
    experts: np.ndarray
    """``[token, MoE layer, k]``, in increasing order."""


def serve(url: str, walk: Walk, prompts: list[list[int]], new_tokens: list[int]) -> list[Answer]:
    """Greedy answers to ``prompts``, all at once, with SGLang's own recording of their routing."""
    sampling = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in new_tokens]
    body = {"input_ids": prompts, "sampling_params": sampling, "return_routed_experts": True}
    reply = requests.post(f"{url}/generate", json=body, timeout=patience(300))
    reply.raise_for_status()
    return [answer(walk, prompt, response) for prompt, response in zip(prompts, reply.json(), strict=True)]


def answer(walk: Walk, prompt: list[int], response: dict[str, Any]) -> Answer:
    recorded = response["meta_info"]["routed_experts"]
    tokens = np.array([*prompt, *response["output_ids"]])[:-1]
    layers, top_k = walk.routing.ids.shape[1:]
    experts = np.frombuffer(base64.b64decode(recorded), np.int32).reshape(len(tokens), -1, top_k)
    return Answer(tokens, np.sort(experts[:, -layers:], axis=-1))  # dense layers, if any, come first


def walked(url: str, walk: Walk) -> list[Answer]:
    """Every stretch of the walk from its first to its last position."""
    stretches = range(len(walk.starts))
    lengths = [int(length) + 1 for length in walk.routing.seq_len]  # the last token generated is not routed
    return serve(url, walk, [walk.prompt_ids(stretch, PROMPT) for stretch in stretches], lengths)


def differences(walk: Walk, answers: list[Answer]) -> list[str]:
    """Where the answers leave the walk; none where they are as they should be."""
    found = []
    for request, served in enumerate(answers):
        positions = walk.position_of(served.tokens)
        lost = np.flatnonzero(positions[1:] != (positions[:-1] + 1) % walk.positions)
        if lost.size:
            found.append(f"request {request}: position {positions[lost[0]]} is followed by {positions[lost[0] + 1]}")
        wrong = (served.experts != np.sort(walk.experts_of(served.tokens), axis=-1)).any(-1)
        if wrong.any():
            token, layer = np.argwhere(wrong)[0]
            found.append(
                f"request {request}: {wrong.sum()} of {wrong.size} routings differ, the first at token {token} (position "
                f"{positions[token]}) in MoE layer {layer}: {served.experts[token, layer].tolist()} "
                f"and not {sorted(walk.experts_of(served.tokens)[token, layer].tolist())}"
            )
    return found


def as_trace(answers: list[Answer], num_experts: int) -> Trace:
    """What was routed while decoding."""
    decoded = [served.experts[PROMPT:] for served in answers]
    return Trace(np.concatenate(decoded), np.array([len(ids) for ids in decoded]), num_experts)


def hit_rate(trace: Trace) -> np.ndarray:
    """``[n]`` for n = 0..experts: the share of activations that go to a layer's n most used experts, mean over the layers."""
    layers = [np.bincount(ids.ravel(), minlength=trace.num_experts) for ids in trace.ids.swapaxes(0, 1)]
    ordered = -np.sort(-np.stack(layers), axis=1) / trace.ids[:, 0].size
    return np.concatenate([[0.0], ordered.cumsum(axis=1).mean(axis=0)])


def overlap(trace: Trace, lag: int) -> float:
    """The share of a token's experts that the token ``lag`` before it in its request used too, mean over tokens and layers."""
    request = np.repeat(np.arange(trace.num_requests), trace.seq_len)
    later = lag + np.flatnonzero(request[lag:] == request[:-lag])
    now, then = trace.ids[later], trace.ids[later - lag]
    return float((now[..., :, None] == then[..., None, :]).any(-1).mean()) if later.size else float("nan")


def lift(trace: Trace, lag: int) -> float:
    """``overlap``, over what it would be by chance."""
    return overlap(trace, lag) * trace.num_experts / trace.ids.shape[2]

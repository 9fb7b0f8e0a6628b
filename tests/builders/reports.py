"""What a server or a replay reports, and the text that a report of it shows."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import msgspec
from builders.managers import Rank, config

from sglang_uvm_offload.report.source import ReplayResults, ServerInfo
from sglang_uvm_offload.residency.history import Past
from sglang_uvm_offload.routing.counts import Phase

FAULT = "prefetch of w13 of MoE layer 3 <b>failed</b>"


def info(*statuses: dict[str, Any], **state: Any) -> ServerInfo:
    """Returns the info of a server with these ranks, decoded as the command decodes it."""
    state = {"expert_offload_num_resident": "3", "expert_offload_resident_selection": "frequency", **state}
    states = [{"expert_offload": status, **state} for status in statuses]
    return msgspec.json.decode(json.dumps({"internal_states": states, "model_path": "m/a<b>"}), type=ServerInfo)


UNIFORM = [0.0, 0.5, 0.7, 0.9, 1.0]


def judged(
    *,
    present: float = 0.69,
    served: tuple[float, float] = (0.0, 0.0),
    uniform: list[float] = UNIFORM,
    pooled: list[float] | None = None,
    steps: int = 1000,
    moved: tuple[int, int] = (0, 0),
    streamed: tuple[int, int] = (0, 0),
    ranks: int = 1,
    state: dict[str, Any] | None = None,
    **status: Any,
) -> ServerInfo:
    """A server with 4 of 8 experts a layer resident and these figures: by default, the best 4 would have reached 70 %.
    ``served`` (hit rates), ``moved`` and ``streamed`` (bytes) are those of the first and the latest half of the time."""
    curve = {"decode_steps": steps, "activations": 2000, "present": present, "residents": [0, 2, 4, 6, 8]}
    curve |= {"uniform": uniform, "global": pooled or uniform}
    past = msgspec.to_builtins(Past([0.0, 50.0, 100.0], *[[0, 0, 0]] * 11))
    past |= {"activations": [0, 1000, 2000], "activations_resident": [0, round(1000 * served[0]), round(1000 * sum(served))]}
    past |= {"routed": [0, 500, 1000], "routed_resident": [0, 250, 500]}
    past |= {"zero_copy_bytes": [0, 1000, 2000], "moved_bytes": [0, moved[0], sum(moved)], "moves": [0, 1, 2]}
    past |= {"streamed_bytes": [0, streamed[0], sum(streamed)]}
    base = Rank(config(num_resident=4)).status() | {"curve": curve, "history": past, "warmup_done": True, "routed": 1000}
    return info(*[base | status] * ranks, **(state or {}))


def slots(experts: int, **fields: int) -> dict[str, Any]:
    """The slots of a rank of ``judged``: so many a layer."""
    nbytes = sum(layer["expert_bytes"] for layer in Rank(config()).status()["layers"]) * experts
    used = {"hits": 6, "fills": 3, "bypasses": 1, "filled_bytes": 9, "brought": 0, **fields}
    return {"a_layer": experts, "nbytes": nbytes, "missing": None, **used}


def words(html: str) -> str:
    """Returns the text that a browser shows."""
    shown: list[str] = []
    parser = HTMLParser()
    parser.handle_data = shown.append
    parser.feed(html.partition("<body>")[2])
    return " ".join(" ".join(shown).split())


def stepped(rank: Rank, steps: int = 4) -> dict[str, Any]:
    """Returns the status of a rank that prefilled once and decoded, on experts 0, 1 (resident) and 7."""
    rank.step([[0, 7]] * 5, phase=Phase.PREFILL)
    for _ in range(steps):
        rank.step([[0, 7], [1, 7]])
    return rank.status()


def result(policy: str, **fields: Any) -> dict[str, Any]:
    out = {"policy": policy, "residency": 0.5, "batch": 1, "hit_rate": 0.8, "moves_per_step": 0.25, "step_seconds": 0.002}
    out |= {"read_bytes_per_step": 3 * 2.0**20, "moved_bytes_per_step": 2.0**20}
    return {**out, "per_layer_hit_rate": [0.7, 0.9], "hit_rate_over_time": [0.6, 0.8, 0.9], **fields}


def replayed(*results: dict[str, Any]) -> ReplayResults:
    return msgspec.json.decode(json.dumps({"trace": "t.npz", "results": results}), type=ReplayResults)

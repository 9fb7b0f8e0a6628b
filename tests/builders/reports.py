"""What a server or a replay reports, and the words that a report of it shows."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import msgspec
from builders.managers import Rank

from sglang_uvm_offload.report.source import ReplayResults, ServerInfo
from sglang_uvm_offload.routing.counts import Phase

FAULT = "prefetch of w13 of MoE layer 3 <b>failed</b>"


def info(*statuses: dict[str, Any], **state: Any) -> ServerInfo:
    """What a server that shows these ranks says, decoded as the command decodes it."""
    state = {"expert_offload_num_resident": "3", "expert_offload_resident_selection": "frequency", **state}
    states = [{"expert_offload": status, **state} for status in statuses]
    return msgspec.json.decode(json.dumps({"internal_states": states, "model_path": "m/a<b>"}), type=ServerInfo)


def words(html: str) -> str:
    """The text that a browser shows."""
    shown: list[str] = []
    parser = HTMLParser()
    parser.handle_data = shown.append
    parser.feed(html.partition("<body>")[2])
    return " ".join(" ".join(shown).split())


def stepped(rank: Rank, steps: int = 4) -> dict[str, Any]:
    """The status of a rank that prefilled once and decoded, on experts 0, 1 (resident) and 7."""
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

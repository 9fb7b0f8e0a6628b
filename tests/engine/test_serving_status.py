"""The status of every rank of a real server, and the terminal view of it."""

from __future__ import annotations

import json
import re
import urllib.error
from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import Engines

from scripts.harness.server import Server
from sglang_uvm_offload.cli.main import main

EXPERTS, LAYERS = 16, 3
PROMPT = {"text": "the quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}
MODES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "TP 2": ({"tp_size": 2}, ["dp0 pp0 tp0 ep0", "dp0 pp0 tp1 ep0"]),
    "PP 2": ({"pp_size": 2}, ["dp0 pp0 tp0 ep0", "dp0 pp1 tp0 ep0"]),
    "DP attention 2": (
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        ["dp0 pp0 tp0 ep0", "dp1 pp0 tp1 ep0"],
    ),
}


ROWS = {"TP 2": ["tp0", "tp1"], "PP 2": ["pp0", "pp1"], "DP attention 2": ["dp0 tp0", "dp1 tp1"]}


def named(rank: dict[str, Any]) -> str:
    return " ".join(f"{kind}{number}" for kind, number in rank["rank"].items())


def refused(server: Server, action: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as error:
        server.post("/expert_offload", {"action": action})
    return error.value.code, json.loads(error.value.read())["error"]


@pytest.mark.parametrize("mode", [m if m == "TP 2" else pytest.param(m, marks=pytest.mark.nightly) for m in MODES])
def test_every_rank_answers_and_residents_are_chosen_from_enough_tokens_only(
    mode: str, checkpoints: Checkpoints, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, names = MODES[mode]
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    with engines.server(checkpoint, **arguments, expert_offload_num_resident=EXPERTS // 2) as server:
        first = server.get("/expert_offload")
        code, reason = refused(server, "readvise")
        server.post("/generate", PROMPT)
        while_busy = [server.get("/expert_offload") for _ in range(5)]
        chosen = server.post("/expert_offload", {"action": "readvise"})
        assert main(["status", server.url]) == 0
    table = capsys.readouterr().out.splitlines()
    for status in (first, *while_busy, chosen):
        assert [named(rank) for rank in status["ranks"]] == names
        assert status["left_out"] == 0
    layers = [[layer["layer"] for layer in rank["layers"]] for rank in first["ranks"]]
    assert sorted({layer for own in layers for layer in own}) == list(range(LAYERS))
    assert (len({tuple(own) for own in layers}) == 1) == (mode != "PP 2")
    assert [line.split("  ")[0] for line in table if re.match("(dp|pp|tp)\\d", line)] == ROWS[mode]
    assert code == 409
    assert "tokens since residents were last chosen: " in reason
    assert all(rank["chosen_from_tokens"] is None for rank in first["ranks"])
    tokens = {rank["chosen_from_tokens"] for rank in chosen["ranks"]}
    assert f"from the routing of {max(tokens)} tokens" in chosen["note"]
    assert all(rank["fewest_tokens"] <= count for rank in chosen["ranks"] for count in tokens)

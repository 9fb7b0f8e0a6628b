"""The report's pages: what they show of a server's ranks or of a replay's policies."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_manager import LAYERS, E, Rank, config, profile_of
from test_svg import cells_of, texts

from sglang_uvm_offload import report_page
from sglang_uvm_offload.plugin.recording import Recording
from sglang_uvm_offload.recorder import Recorder
from sglang_uvm_offload.replay_page import replay_page
from sglang_uvm_offload.report_page import IN_HOST, IN_VRAM, KINDS, NOT_SHOWN, PARTLY, SHARED, server_page
from sglang_uvm_offload.report_source import ReplayResults, ServerInfo
from sglang_uvm_offload.routing import IdFormat, Phase

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
    return rank.manager.status()


def test_a_page_shows_a_servers_figures():
    said = words(server_page(info(stepped(Rank(config()))), "http://host:30000"))
    for expected in (
        "source http://host:30000",
        "model m/a<b>",
        "frequency, warmup, uniform",
        "9 of 24",  # experts in VRAM
        "50.0 %",  # coverage of routed tokens
        "0.9 MiB",  # 5 steps x 3 layers x 64 KiB read through
        "Of 36 uses of experts in 4 decode steps",
        "now: 3",
        "The host backend emulates",
    ):
        assert expected in said, f"{expected!r} is not in {said}"
    assert "SGLang shows the first rank" not in said


@pytest.mark.parametrize("section", ["Advice", "What was served", "Where the experts are", "Coverage over time"])
def test_a_page_of_a_server_that_served_nothing_has_every_section(section):
    said = words(server_page(info(Rank(config()).manager.status()), "s"))
    assert section in said
    assert "not counted" in said


def test_a_page_without_moe_layers_is_a_page():
    empty = Rank(config()).manager.status() | {"layers": [], "resident_ids": [], "curve": None}
    assert "Where the experts are" in words(server_page(info(empty), "s"))


def test_the_verdict_on_a_profile_and_the_trace_are_among_the_facts():
    verdict = {"coverage": 0.333, "best": 0.95, "tokens": 40, "kept": False}
    trace = {"path": "/d/<b>t.npz", "tokens": 400, "requests": 3, "dropped_steps": 2, "stopped": False}
    status = Rank(config()).manager.status()
    said = words(server_page(info(status | {"profile": verdict, "trace": trace}), "s"))
    assert (
        "profile its residents covered 33.3 % of the routing of the first 40 live tokens, and the best residents for these "
        "tokens 95.0 %: not trusted, residents were chosen again trace /d/<b>t.npz: 400 tokens of 3 requests, 2 steps not "
        "recorded Advice"
    ) in said
    said = words(server_page(info(status | {"profile": verdict | {"kept": True}, "trace": trace | {"stopped": True}}), "s"))
    assert "tokens 95.0 %: kept trace" in said
    assert "2 steps not recorded; recording stopped, the server's log says why Advice" in said


def test_a_page_without_a_profile_and_a_trace_has_no_rows_for_them():
    said = words(server_page(info(Rank(config()).manager.status() | {"trace": None}), "s"))
    assert "backend host Advice" in said


def test_each_rank_has_a_verdict_of_its_own():
    verdict = {"coverage": 0.9, "best": 0.9, "tokens": 40, "kept": True}
    statuses = [Rank(config()).manager.status() | {"profile": verdict | {"coverage": share}} for share in (0.8, 0.7)]
    said = words(server_page(info(*statuses, dp_size=2), "s"))
    assert "profile, DP rank 0 its residents covered 80.0 %" in said
    assert "profile, DP rank 1 its residents covered 70.0 %" in said


def test_a_verdict_is_read_as_the_manager_gives_it():
    rank = Rank(config(profile="p", warmup_tokens=8), profile=profile_of([(7, 5, 3)] * LAYERS))
    for _ in range(5):
        rank.step([[0, 1], [7, 5]])
    assert "covered 50.0 % of the routing of the first 8 live tokens" in words(server_page(info(rank.manager.status()), "s"))


def test_a_trace_is_read_as_a_rank_tells_of_it():
    recording = Recording("t.npz")
    recording.recorder = Recorder(Path("t.npz"), num_layers=1, num_experts=4, top_k=2, max_rows=2, device="cpu")
    for length in (5, 6):
        recording.recorder.record(0, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), IdFormat.PLAIN)
        recording.recorder.end_step(["a", "b"], [length, length])
    status = Rank(config()).manager.status() | {"trace": recording.status()}
    assert "trace t.npz: 4 tokens of 2 requests, 0 steps not recorded" in words(server_page(info(status), "s"))


def test_what_a_source_says_is_text():
    hostile = stepped(Rank(config())) | {"fault": FAULT, "backend": "<script>", "adapt": "<img src=x>"}
    html = server_page(info(hostile), "<script>alert(1)</script>")
    assert "<script" not in html
    assert "<img" not in html
    assert FAULT in words(html)


def residency(*statuses: dict[str, Any], columns: int = E, **state: Any) -> list[list[int]]:
    figure = report_page._map(info(*statuses, **state))
    assert [text for text in texts(figure) if text in ("1", "2", "3")][:LAYERS] == ["1", "2", "3"]
    return cells_of(figure, (LAYERS, columns), KINDS).tolist()


def test_the_map_of_one_rank_is_its_residents():
    status = Rank(config(resident_selection="manual", resident_ids="2,7")).manager.status()
    row = [IN_VRAM if expert in (2, 7) else IN_HOST for expert in range(E)]
    assert residency(status) == [row] * LAYERS


def test_fused_shared_experts_stand_behind_the_routed_ones():
    status = Rank(config(num_resident=1), num_shared=1).manager.status()
    assert residency(status, columns=E + 1)[0] == [IN_VRAM] + [IN_HOST] * 7 + [SHARED]


def ep_rank(rank: int) -> dict[str, Any]:
    """Expert-parallel rank ``rank`` of 2, which holds four of the experts 1, 4 and 6 that are resident."""
    cfg = config(resident_selection="manual", resident_ids="1,4,6")
    return Rank(cfg, ep_rank=rank, ep_size=2).manager.status()


def test_the_map_joins_expert_parallel_ranks():
    row = [IN_VRAM if expert in (1, 4, 6) else IN_HOST for expert in range(E)]
    both = info(ep_rank(0), ep_rank(1), tp_size=2, ep_size=2, dp_size=2, enable_dp_attention=True)
    assert cells_of(report_page._map(both), (LAYERS, E), KINDS).tolist() == [row] * LAYERS
    assert "SGLang shows the first rank" not in words(server_page(both, "s"))


def test_experts_of_ranks_that_are_not_shown_are_unknown_and_the_page_says_so():
    row = [IN_HOST, IN_VRAM, IN_HOST, IN_HOST, *[NOT_SHOWN] * 4]
    assert residency(ep_rank(0), tp_size=2, ep_size=2) == [row] * LAYERS
    assert "SGLang shows the first rank" in words(server_page(info(ep_rank(0), tp_size=2, ep_size=2), "s"))
    assert "SGLang shows the first rank" in words(server_page(info(ep_rank(0), pp_size=2), "s"))


def test_the_map_shows_where_replicas_differ():
    one, other = (Rank(config(resident_selection="manual", resident_ids=ids)).manager.status() for ids in ("0,1", "1,2"))
    assert residency(one, other, dp_size=2)[0] == [PARTLY, IN_VRAM, PARTLY, *[IN_HOST] * 5]


def test_every_rank_is_in_the_table_and_the_first_ones_in_the_pictures():
    status = stepped(Rank(config()))
    said = words(server_page(info(*[status] * 6, dp_size=6), "s"))
    assert all(f"DP rank {rank} 9 of 24" in said for rank in range(6))
    assert "first 4 of 6 ranks" in said
    assert "read through, DP rank 3" in said
    assert "read through, DP rank 4" not in said


def test_coverage_by_layer_is_over_all_ranks():
    cold, hot = Rank(config()), Rank(config())
    for _ in range(4):
        cold.step([[7, 6]])
        hot.step([[0, 1]])
    figure = report_page._layers_chart(info(cold.manager.status(), hot.manager.status()).ranks)
    assert [title.text for title in figure.iter("title")][1:] == ["1: 50", "2: 50", "3: 50"]


# Replays


def result(policy: str, **fields: Any) -> dict[str, Any]:
    out = {"policy": policy, "residency": 0.5, "batch": 1, "coverage": 0.8, "moves_per_step": 0.25, "step_seconds": 0.002}
    out |= {"read_bytes_per_step": 3 * 2.0**20, "moved_bytes_per_step": 2.0**20}
    return {**out, "per_layer_coverage": [0.7, 0.9], "coverage_over_time": [0.6, 0.8, 0.9], **fields}


def replayed(*results: dict[str, Any]) -> ReplayResults:
    return msgspec.json.decode(json.dumps({"trace": "t.npz", "results": results}), type=ReplayResults)


def test_a_page_of_a_replay_shows_every_policy_in_every_picture():
    html = replay_page(replayed(result("lru"), result("belady", coverage=0.95), result("adaptive<b>")), "r.json")
    said = words(html)
    assert "trace t.npz" in said
    for policy in ("lru", "belady", "adaptive<b>"):
        assert f"{policy} 50.0 % 1" in said
        assert said.count(policy) >= 5
    for shown in ("95.0 %", "0.250", "3.0 MiB", "1.0 MiB", "2.000 ms", "MiB a decode step"):
        assert shown in said

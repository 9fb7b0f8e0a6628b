"""HTML reports: what they show of a server's ranks or of a replay's policies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from builders import links
from builders.charts import cells_of
from builders.locations import located
from builders.managers import LAYERS, E, Rank, config, profile_of
from builders.reports import FAULT, info, replayed, result, stepped, words

from sglang_uvm_offload import __version__
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.plugin.rank.recording import Recording
from sglang_uvm_offload.report import replay_report as replay_module
from sglang_uvm_offload.report import server_report as module
from sglang_uvm_offload.report.replay_report import replay_report
from sglang_uvm_offload.report.server_report import IN_HOST, IN_VRAM, KINDS, NOT_SHOWN, PARTLY, SHARED, server_report
from sglang_uvm_offload.report.source import ReplayResults
from sglang_uvm_offload.report.summary import summary
from sglang_uvm_offload.report.units import duration
from sglang_uvm_offload.routing.counts import IdFormat, Phase
from sglang_uvm_offload.routing.recorder import Recorder

pytestmark = pytest.mark.sglang


def test_a_report_shows_a_servers_figures():
    said = words(server_report(info(stepped(Rank(config()))), "http://host:30000"))
    for expected in (
        "source http://host:30000",
        "model m/a<b>",
        "frequency, warmup",
        "9 of 24",  # experts in VRAM
        "50.0 %",  # hit rate of routed tokens
        "0.9 MiB",  # 5 steps x 3 layers x 64 KiB of zero-copy reads
        "36 activations in 4 decode steps",
        "now: 3",
        "The emulated backend",
    ):
        assert expected in said, f"{expected!r} is not in {said}"
    assert "SGLang shows the first rank" not in said


def test_a_report_shows_what_was_streamed_beside_what_was_read_in_place():
    rank = Rank(config())
    rank.step([[0, 7]] * 5, phase=Phase.PREFILL, streams=True)
    rank.manager.ledger.add_streamed(1, 80 * PAGE_BYTES)
    status = stepped(rank)
    assert "zero-copy reads streamed into slots moves moved link time, estimated rank 0" in (
        said := words(server_report(info(status), "s"))
    )
    assert "0.9 MiB 5.0 MiB none 0 0.0 MiB" in said
    (axes,) = module._bytes_over_time([("rank 0", info(status).ranks[0])]).axes
    read, streamed, moved = (line.get_ydata() for line in axes.lines)
    assert streamed.tolist() == pytest.approx([80 * PAGE_BYTES / 2**10 / 6] * 2)
    assert read.tolist() == pytest.approx([15 * PAGE_BYTES / 2**10 / 6] * 2)
    assert moved.tolist() == [0, 0]


@pytest.mark.parametrize("section", ["Advice", "Totals", "Where the experts are", "Hit rate over time"])
def test_a_report_of_a_server_that_served_nothing_has_every_section(section):
    said = words(server_report(info(Rank(config()).status()), "s"))
    assert section in said
    assert "not counted" in said


def test_a_report_shows_the_measured_link_and_takes_its_rate():
    reason = "4 GPUs share <b>it</b>"
    status = stepped(Rank(config(), link=links.status(scattered=0.035, because=(reason,))))
    said = words(server_report(info(status), "s"))
    assert f"link this machine reads offloaded experts at 0.0 GB/s, 51.7 expected; {reason}" in said
    assert "at the rate that the server measured for scattered reads" in said
    assert "assumed 55 GB/s" not in said
    nbytes = 15 * PAGE_BYTES
    assert f"{nbytes / 0.035e9:.3g} s, {1e3 * nbytes / 0.035e9 / 5:.3g} ms a step" in said
    assert "at an assumed 55 GB/s" in words(server_report(info(stepped(Rank(config()))), "s"))


def test_a_report_shows_what_slots_served_and_what_prompts_left_in_them():
    slots = {"a_layer": 5, "nbytes": 1, "missing": None, "hits": 6, "fills": 3, "bypasses": 1, "filled_bytes": 9, "kept": 7}
    status = stepped(Rank(config())) | {"slots": slots}
    said = words(server_report(info(status), "s"))
    shares = "60.0 % were served by a slot, 30.0 % filled one, 10.0 % were read in place"
    served = f"5 a layer: of the uses of offloaded experts, {shares}"
    assert f"{served}; prompts that streamed left 7 experts in slots" in said
    status["slots"] |= {"kept": 0, "missing": "bias"}
    assert f"{served}; bias has no rows for them" in words(server_report(info(status), "s"))


def test_a_report_without_moe_layers_is_a_report():
    empty = Rank(config()).status() | {"layers": [], "resident_ids": [], "partly_resident_ids": [], "curve": None}
    assert "Where the experts are" in words(server_report(info(empty), "s"))


def test_the_verdict_on_a_profile_and_the_trace_are_among_the_facts():
    verdict = {"hit_rate": 0.333, "best": 0.95, "tokens": 40, "kept": False}
    trace = {"path": "/d/<b>t.npz", "tokens": 400, "requests": 3, "dropped_steps": 2, "stopped": False}
    status = Rank(config()).status()
    said = words(server_report(info(status | {"profile": verdict, "trace": trace}), "s"))
    assert (
        "profile hit rate 33.3 % over the first 40 live tokens; the best residents for these tokens would have reached "
        "95.0 %: residents were chosen again trace /d/<b>t.npz: 400 tokens of 3 requests, 2 steps not "
        "recorded Advice"
    ) in said
    said = words(server_report(info(status | {"profile": verdict | {"kept": True}, "trace": trace | {"stopped": True}}), "s"))
    assert "95.0 %: residents kept trace" in said
    assert "2 steps not recorded; recording stopped: see the server's log Advice" in said


def test_a_report_without_a_profile_and_a_trace_has_no_rows_for_them():
    said = words(server_report(info(Rank(config()).status() | {"trace": None}), "s"))
    assert "backend emulated Advice" in said


def test_each_rank_has_a_verdict_of_its_own():
    verdict = {"hit_rate": 0.9, "best": 0.9, "tokens": 40, "kept": True}
    statuses = [Rank(config()).status() | {"profile": verdict | {"hit_rate": share}} for share in (0.8, 0.7)]
    said = words(server_report(info(*statuses, dp_size=2), "s"))
    assert "profile, DP rank 0 hit rate 80.0 %" in said
    assert "profile, DP rank 1 hit rate 70.0 %" in said


def test_a_verdict_is_read_as_the_manager_gives_it():
    rank = Rank(config(profile="p", warmup_tokens=8), profile=profile_of([(7, 5, 3)] * LAYERS))
    for _ in range(5):
        rank.step([[0, 1], [7, 5]])
    assert "hit rate 50.0 % over the first 8 live tokens" in words(server_report(info(rank.status()), "s"))


def test_a_trace_is_read_as_a_rank_tells_of_it():
    recording = Recording(Path("t.npz"))
    recording.recorder = Recorder(Path("t.npz"), locations=located(1, 4), top_k=2, max_rows=2, device="cpu")
    for length in (5, 6):
        recording.recorder.record(0, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), IdFormat.PLAIN)
        recording.recorder.end_step(["a", "b"], [length, length])
    status = Rank(config()).status() | {"trace": msgspec.to_builtins(recording.status())}
    assert "trace t.npz: 4 tokens of 2 requests, 0 steps not recorded" in words(server_report(info(status), "s"))


def test_what_a_source_says_is_text():
    hostile = stepped(Rank(config())) | {"fault": FAULT, "backend": "<script>", "adapt": "<img src=x>"}
    html = server_report(info(hostile), "<script>alert(1)</script>")
    assert "<script" not in html
    assert "<img" not in html
    assert FAULT in words(html)


def residency(*statuses: dict[str, Any], **state: Any) -> list[list[int]]:
    figure = module._map(info(*statuses, **state))
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["1", "2", "3"]
    return cells_of(figure, KINDS).tolist()


def test_the_map_of_one_rank_is_its_residents():
    status = Rank(config(resident_selection="manual", resident_ids="2,7")).status()
    row = [IN_VRAM if expert in (2, 7) else IN_HOST for expert in range(E)]
    assert residency(status) == [row] * LAYERS


def test_fused_shared_experts_stand_behind_the_routed_ones():
    status = Rank(config(num_resident=1), num_shared=1).status()
    assert residency(status)[0] == [IN_VRAM] + [IN_HOST] * 7 + [SHARED]


def ep_rank(rank: int) -> dict[str, Any]:
    """Expert-parallel rank ``rank`` of 2, which holds four of the experts 1, 4 and 6 that are resident."""
    cfg = config(resident_selection="manual", resident_ids="1,4,6")
    return Rank(cfg, ep_rank=rank, ep_size=2).status()


def test_the_map_joins_expert_parallel_ranks():
    row = [IN_VRAM if expert in (1, 4, 6) else IN_HOST for expert in range(E)]
    both = info(ep_rank(0), ep_rank(1), tp_size=2, ep_size=2, dp_size=2, enable_dp_attention=True)
    assert cells_of(module._map(both), KINDS).tolist() == [row] * LAYERS
    assert "SGLang shows the first rank" not in words(server_report(both, "s"))


def test_experts_of_ranks_that_are_not_shown_are_unknown_and_the_report_says_so():
    row = [IN_HOST, IN_VRAM, IN_HOST, IN_HOST, *[NOT_SHOWN] * 4]
    assert residency(ep_rank(0), tp_size=2, ep_size=2) == [row] * LAYERS
    assert "SGLang shows the first rank" in words(server_report(info(ep_rank(0), tp_size=2, ep_size=2), "s"))
    assert "SGLang shows the first rank" in words(server_report(info(ep_rank(0), pp_size=2), "s"))


def test_the_map_shows_where_replicas_differ():
    one, other = (Rank(config(resident_selection="manual", resident_ids=ids)).status() for ids in ("0,1", "1,2"))
    assert residency(one, other, dp_size=2)[0] == [PARTLY, IN_VRAM, PARTLY, *[IN_HOST] * 5]


def test_the_map_is_of_the_checkpoints_experts_wherever_they_lie():
    named = config(resident_selection="manual", resident_ids="2,7")
    row = [IN_VRAM if expert in (2, 7) else IN_HOST for expert in range(E)]
    assert residency(Rank(named, experts=[*range(E)][::-1]).status()) == [row] * LAYERS


def test_the_map_of_a_rank_with_later_experts_leaves_the_earlier_ones_unknown():
    status = Rank(config(num_resident=2), experts=[*range(E)][::-1], ep_size=2).status()
    assert residency(status, tp_size=2, ep_size=2) == [[NOT_SHOWN] * 4 + [IN_HOST] * 3 + [IN_VRAM]] * LAYERS


def test_the_map_shows_an_expert_of_which_one_replica_is_resident():
    status = Rank(config(num_resident=2), experts=[*range(E), 0]).status()
    assert residency(status) == [[PARTLY, IN_VRAM] + [IN_HOST] * (E - 2)] * LAYERS


def test_every_rank_is_in_the_table_and_the_first_ones_in_the_pictures():
    status = stepped(Rank(config()))
    said = words(server_report(info(*[status] * 6, dp_size=6), "s"))
    assert all(f"DP rank {rank} 9 of 24" in said for rank in range(6))
    assert "first 4 of 6 ranks" in said
    assert "zero-copy reads, DP rank 3" in said
    assert "zero-copy reads, DP rank 4" not in said


def test_hit_rate_by_layer_is_over_all_ranks():
    cold, hot = Rank(config()), Rank(config())
    for _ in range(4):
        cold.step([[7, 6]])
        hot.step([[0, 1]])
    figure = module._layers_chart(info(cold.status(), hot.status()).ranks)
    assert [bar.get_height() for bar in figure.axes[0].patches] == [50, 50, 50]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["1", "2", "3"]


# Replays


def test_a_report_of_a_replay_shows_every_policy_in_every_picture():
    html = replay_report(replayed(result("lru"), result("belady", hit_rate=0.95), result("adaptive<b>")), "r.json")
    said = words(html)
    assert "trace t.npz" in said
    for policy in ("lru", "belady", "adaptive<b>"):
        assert f"{policy} 50.0 % 1" in said
        assert said.count(policy) >= 5
    for shown in ("95.0 %", "0.250", "3.0 MiB", "1.0 MiB", "2.000 ms", "MiB a decode step"):
        assert shown in said


def test_experts_that_are_in_vram_in_part_are_shown_as_such_and_counted_by_their_bytes():
    """Blocks of two pages, experts of three: of the fourth a third is beside the third."""
    rank = Rank(config(), EmulatedMemory(2 * PAGE_BYTES), expert_bytes=3 * PAGE_BYTES)
    assert residency(rank.status()) == [[IN_VRAM] * 3 + [PARTLY] + [IN_HOST] * 4] * LAYERS
    for ids in ([[0]], [[0]], [[3]]):
        rank.step(ids)
    rank.step([[3, 3]])
    shown = words(server_report(info(rank.status()), "s"))
    # Of 5 routed tokens two were served whole and three by a third; of 4 activations two and two.
    assert "60.0 % 66.7 %" in shown


# The verdict, and what the page is of


def judged(status, **changes):
    curve = {"decode_steps": 1000, "activations": 1000, "present": 0.37, "residents": [0, 3, 8]}
    curve |= {"uniform": [0.0, 0.38, 1.0], "global": [0.0, 0.4, 1.0]}
    history = status["history"]
    served = [round(0.37 * count) for count in history["activations"]]
    history = history | {"activations_resident": served}
    return info(status | {"warmup_done": True, "curve": curve, "history": history} | changes)


def test_the_page_begins_with_a_verdict_and_what_to_do():
    served = info(stepped(Rank(config())))
    assert words(server_report(served, "s")).startswith(
        "Where experts were served from Hit rate 50.0 % so far; too early to judge"
    )
    said = summary(judged(stepped(Rank(config()))))
    assert said.startswith("Hit rate 37.0 % in decode steps: low, because 3 of 8 experts a layer are in VRAM")
    assert "--expert-offload-num-resident" in said


def test_a_verdict_blames_the_choice_where_another_is_better():
    status = stepped(Rank(config()))
    curve = {"decode_steps": 1000, "activations": 1000, "present": 0.5, "residents": [0, 3, 8]}
    curve |= {"uniform": [0.0, 0.95, 1.0], "global": [0.0, 0.95, 1.0]}
    assert "fair, because other residents would serve more" in summary(judged(status, curve=curve | {"present": 0.7}))
    assert "high, and about the best" in summary(judged(status, curve=curve | {"present": 0.94}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fault": "x"}, "Moving experts stopped"),
        ({"evicted_bytes": 1}, "evicted resident experts"),
        ({"offloaded_experts": 0}, "Every expert is in VRAM"),
        ({"routed": 0}, "No routing was counted"),
        ({"warmup_done": False}, "warm-up is not over"),
        ({"curve": None}, "256 more decode steps are needed"),
    ],
)
def test_a_verdict_names_what_is_most_urgent(changes, said):
    assert said in summary(judged(stepped(Rank(config())), **changes))


def test_the_steps_that_are_missing_are_counted():
    curve = {"decode_steps": 56, "activations": 9, "present": 0.5, "residents": [0, 8], "uniform": [0, 1], "global": [0, 1]}
    few = judged(stepped(Rank(config())), curve=curve)
    assert "because 200 more decode steps are needed" in summary(few)
    assert "it takes 256. Report again after 200 more." in words(server_report(few, "s"))


def test_a_page_has_its_date_the_plugins_version_and_how_long_the_model_is_loaded():
    status = stepped(Rank(config()))
    status["history"]["seconds"] = [second * 7200.0 for second in range(len(status["history"]["seconds"]))]
    hours = status["history"]["seconds"][-1]
    said = words(server_report(info(status), "s"))
    assert re.search(r"written \d{4}-\d\d-\d\d \d\d:\d\d UTC model", said)
    assert f"sglang-uvm-offload {__version__} model loaded {duration(hours)} before" in said
    del status["plugin_version"]
    old = words(server_report(info(status), "s"))
    assert "sglang-uvm-offload 0" not in old, "statistics of an earlier version are readable"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 seconds"), (119, "119 seconds"), (150, "2.5 minutes"), (2e5, "2.3 days")])
def test_durations_are_in_the_largest_unit_of_which_there_are_two(seconds, text):
    assert duration(seconds) == text


def test_the_bytes_over_the_link_are_given_as_time_at_an_assumed_rate():
    status = stepped(Rank(config()))
    past = status["history"]
    for name, total in (("zero_copy_bytes", 50e9), ("streamed_bytes", 4e9), ("moved_bytes", 1e9)):
        past[name] = [0] * (len(past[name]) - 1) + [int(total)]
    past["steps"] = [0] * (len(past["steps"]) - 1) + [100]
    said = words(server_report(info(status), "s"))
    assert "1 s, 10 ms a step" in said
    assert "at an assumed 55 GB/s" in said


def test_a_report_of_a_replay_says_what_was_scored_and_assumed():
    content = json.loads(msgspec.json.encode(replayed(result("lru"))))
    assert "GB/s" not in words(replay_report(msgspec.convert(content, ReplayResults), "r"))
    scored = {"requests": 3, "steps": 9, "warmup_requests": 2, "warmup_steps": 5, "link_gbps": 55.0, "link_assumed": True}
    content["scored"] = scored | {"expert_bytes": 1 << 20, "expert_bytes_assumed": False, "shipped": "adaptive"}
    said = words(replay_report(msgspec.convert(content, ReplayResults), "r"))
    assert "scored 3 requests in 9 decode steps warm-up 2 requests in 5 decode steps link 55 GB/s, assumed" in said


def test_few_layers_are_points_and_many_are_lines():
    def joined(layers):
        results = replayed(result("lru", per_layer_hit_rate=[0.5] * layers)).results
        (line,) = replay_module._layers_chart(results).axes[0].lines
        return line.get_linestyle() != "None"

    assert [joined(layers) for layers in (2, 12, 13)] == [False, False, True]

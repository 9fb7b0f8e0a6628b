"""HTML reports: what they show of a server's ranks or of a replay's policies."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

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
from sglang_uvm_offload.report.units import duration
from sglang_uvm_offload.routing.counts import IdFormat, Phase
from sglang_uvm_offload.routing.recorder import Recorder

pytestmark = pytest.mark.sglang

ONE_OF_SEVERAL = "Other ranks are not included."


def figures_of(*statuses: dict[str, Any], **state: Any) -> dict[str, list[str]]:
    """The totals: each figure of these ranks by its name."""
    rows = module._totals(info(*statuses, **state)).iter("tr")
    cells = [[next(cell.itertext(), "") for cell in row] for row in rows]
    return {name: figures for name, *figures in cells}


def page(*statuses: dict[str, Any], source: str = "s", **state: Any) -> str:
    """The words of the report on a server with these ranks."""
    return words(server_report(info(*statuses, **state), source))


def test_a_report_shows_a_servers_figures():
    status = stepped(Rank(config()))
    status["history"]["seconds"] = [second * 7200.0 for second in range(len(status["history"]["seconds"]))]
    said = page(status, source="http://host:30000")
    assert said.startswith("Where experts were served from Hit rate 50.0 % so far; too early to judge")
    for expected in (
        "source http://host:30000",
        "model m/a<b>",
        f"sglang-uvm-offload {__version__} model loaded {duration(status['history']['seconds'][-1])} before",
        "frequency, warmup",
        "9 of 24",  # experts in VRAM
        "50.0 %",  # hit rate of routed tokens
        "0.9 MiB",  # 5 steps x 3 layers x 64 KiB of zero-copy reads
        "36 activations in 4 decode steps",
        "now: 3",
        "The emulated backend",
    ):
        assert expected in said, f"{expected!r} is not in {said}"
    assert re.search(r"written \d{4}-\d\d-\d\d \d\d:\d\d UTC model", said)
    assert ONE_OF_SEVERAL not in said
    del status["plugin_version"]
    assert "sglang-uvm-offload 0" not in page(status), "statistics of an earlier version are readable"


def test_a_server_that_served_nothing_or_has_no_moe_layers_has_every_section():
    nothing = Rank(config()).status()
    empty = nothing | {"layers": [], "resident_ids": [], "partly_resident_ids": [], "curve": None, "trace": None}
    for said in (page(nothing), page(empty)):
        assert all(section in said for section in ("Totals", "Where the experts are", "Hit rate over time", "not counted"))
    assert "backend emulated Totals" in page(empty), "no rows for a profile, a trace, slots or a link"


def test_a_report_shows_what_was_streamed_beside_what_was_read_in_place():
    rank = Rank(config())
    rank.step([[0, 7]] * 5, phase=Phase.PREFILL, streams=True)
    rank.manager.ledger.add_streamed(1, 80 * PAGE_BYTES)
    status = stepped(rank)
    assert figures_of(status)["zero-copy reads"] == ["0.9 MiB"]
    assert figures_of(status)["streamed"] == ["5.0 MiB"]
    assert "copied into slots" not in figures_of(status)
    (axes,) = module._bytes_over_time([("rank 0", info(status).ranks[0])])().axes
    read, streamed, moved = (line.get_ydata() for line in axes.lines)
    assert streamed.tolist() == pytest.approx([80 * PAGE_BYTES / 2**10 / 6] * 2)
    assert read.tolist() == pytest.approx([15 * PAGE_BYTES / 2**10 / 6] * 2)
    assert moved.tolist() == [0, 0]


def test_vram_that_experts_left_is_shown_beside_what_is_resident():
    rank = Rank(config(warmup_tokens=4))
    rank.step([[7, 6, 5]] * 4)
    rank.step([[7, 6, 5]])
    status = rank.status()
    assert [figures_of(status)[name] for name in ("experts in VRAM", "their bytes", "reclaimable", "experts in host RAM")] == [
        ["9 of 24"],
        ["0.6 MiB"],
        ["at most 0.6 MiB"],
        ["0.9 MiB"],
    ]
    del status["reclaimable_bytes"]
    assert figures_of(status)["reclaimable"] == ["not counted"], "statistics of an earlier version are readable"


def test_link_time_is_at_the_measured_rate_or_an_assumed_one():
    reason = "4 GPUs share <b>it</b>"
    said = page(stepped(Rank(config(), link=links.status(scattered=0.035, because=(reason,)))))
    assert f"link this machine reads offloaded experts at 0.0 GB/s, 51.7 expected; {reason}" in said
    assert "at the rate that the server measured for scattered reads" in said
    nbytes = 15 * PAGE_BYTES
    assert f"measured for scattered reads when it started. {nbytes / 0.035e9:.3g} s" in said
    assert f"link time a step {1e3 * nbytes / 0.035e9 / 5:.3g} ms" in said
    status = stepped(Rank(config()))
    past = status["history"]
    for name, total in (("zero_copy_bytes", 50e9), ("streamed_bytes", 4e9), ("moved_bytes", 1e9), ("steps", 100)):
        past[name] = [0] * (len(past[name]) - 1) + [int(total)]
    assert figures_of(status)["link time, estimated"] == ["1 s"]
    assert figures_of(status)["link time a step"] == ["10 ms"]
    assert "at an assumed 55 GB/s" in page(status)


@pytest.mark.parametrize(
    ("ahead", "told"),
    [
        ((40, 25, 10), "25 % of 40 misses came ahead; 40 % of what came ahead was used"),
        ((40, 0, 0), "nothing came ahead of 40 misses"),
        ((0, 5, 0), "0 % of 0 misses came ahead; 0 % of what came ahead was used"),
    ],
)
def test_what_came_ahead_is_among_the_facts(ahead, told):
    status = Rank(config()).status() | {"lookahead": dict(zip(("misses", "brought", "right"), ahead, strict=True))}
    assert f"look-ahead {told}" in page(status)
    assert "look-ahead" not in page(status | {"lookahead": None})


def test_slots_a_profile_and_a_trace_are_among_the_facts():
    slots = {"a_layer": 5, "nbytes": 1, "missing": None, "hits": 6, "fills": 3, "bypasses": 1, "filled_bytes": 9, "brought": 7}
    profile = {"hit_rate": 0.333, "best": 0.95, "tokens": 40, "kept": False}
    trace = {"path": "/d/<b>t.npz", "tokens": 400, "requests": 3, "dropped_steps": 2, "stopped": False}
    status = Rank(config()).status() | {"slots": slots, "profile": profile, "trace": trace}
    shares = "60.0 % were served by a slot, 30.0 % filled one, 10.0 % were read in place"
    served = f"5 a layer: of the uses of offloaded experts, {shares}"
    tokens = "hit rate 33.3 % over the first 40 live tokens; the best residents for these tokens would have reached 95.0 %"
    recorded = "/d/<b>t.npz: 400 tokens of 3 requests, 2 steps not recorded"
    said = page(status)
    assert f"slots {served}; 7 experts came into slots ahead of prompts profile {tokens}" in said
    assert f"{tokens}: residents were chosen again trace {recorded} Totals" in said
    status["slots"] |= {"brought": 0, "missing": "bias"}
    status["profile"] |= {"kept": True}
    status["trace"] |= {"stopped": True}
    said = page(status, status | {"profile": profile | {"hit_rate": 0.7}}, dp_size=2)
    assert f"slots {served}; bias has no rows for them trace {recorded}; recording stopped: see the server's log" in said
    assert f"What differs between ranks profile, rank 0 {tokens}: residents kept profile, rank 1 hit rate 70.0 %" in said


def test_a_profiles_verdict_and_a_trace_are_read_as_a_rank_tells_of_them():
    rank = Rank(config(profile="p", warmup_tokens=8), profile=profile_of([(7, 5, 3)] * LAYERS))
    for _ in range(5):
        rank.step([[0, 1], [7, 5]])
    recording = Recording(Path("t.npz"))
    recording.recorder = Recorder(Path("t.npz"), locations=located(1, 4), top_k=2, max_rows=2, device="cpu")
    for length in (5, 6):
        recording.recorder.record(0, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), IdFormat.PLAIN)
        recording.recorder.end_step(["a", "b"], [length, length])
    said = page(rank.status() | {"trace": msgspec.to_builtins(recording.status())})
    assert "hit rate 50.0 % over the first 8 live tokens" in said
    assert "trace t.npz: 4 tokens of 2 requests, 0 steps not recorded" in said


def test_what_a_source_says_is_text():
    hostile = stepped(Rank(config())) | {"fault": FAULT, "backend": "<script>", "adapt": "<img src=x>"}
    html = server_report(info(hostile), "<script>alert(1)</script>")
    assert "<script" not in html
    assert "<img" not in html
    assert FAULT in words(html)


def test_a_page_fits_a_phone():
    html = server_report(info(stepped(Rank(config()))), "s")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    body = ElementTree.fromstring(html[html.index("<body>") : html.index("</html>")])
    pictures = [[svg.get("class") for svg in figure] for figure in body.iter("figure")]
    assert pictures == [["wide", "narrow"]] * 6
    scrolling = [table for box in body.iter("div") if box.get("class") == "table" for table in box.iter("table")]
    assert {table for table in body.iter("table") if table.get("class") != "facts"} == set(scrolling)
    ids = [node.get("id") for node in body.iter() if node.get("id")]
    assert len(ids) == len(set(ids)), "a reference would find the picture that is not shown"


# The map


def manual(ids: str, **arguments: Any) -> dict[str, Any]:
    return Rank(config(resident_selection="manual", resident_ids=ids), **arguments).status()


def first(residents: int, **arguments: Any) -> dict[str, Any]:
    return Rank(config(num_resident=residents), **arguments).status()


def row(vram: set[int] = frozenset(), partly: set[int] = frozenset(), unknown: set[int] = frozenset()) -> list[int]:
    return [IN_VRAM if e in vram else PARTLY if e in partly else NOT_SHOWN if e in unknown else IN_HOST for e in range(E)]


BACKWARDS = [*range(E)][::-1]
TWO = {"tp_size": 2, "ep_size": 2}
HIGH, LOW = set(range(4, 8)), set(range(4))
MAPS = {
    "one rank": (lambda: [manual("2,7")], {}, row({2, 7})),
    "shared experts behind the routed ones": (lambda: [first(1, num_shared=1)], {}, [*row({0}), SHARED]),
    "expert-parallel ranks, joined": (
        lambda: [manual("1,4,6", ep_rank=rank, ep_size=2) for rank in (0, 1)],
        {**TWO, "dp_size": 2, "enable_dp_attention": True},
        row({1, 4, 6}),
    ),
    "experts of ranks that are not shown": (lambda: [manual("1,4,6", ep_rank=0, ep_size=2)], TWO, row({1}, unknown=HIGH)),
    "a rank with later experts alone": (lambda: [first(2, experts=BACKWARDS, ep_size=2)], TWO, row({7}, unknown=LOW)),
    "replicas that differ": (lambda: [manual("0,1"), manual("1,2")], {"dp_size": 2}, row({1}, {0, 2})),
    "experts by the checkpoint's ids": (lambda: [manual("2,7", experts=BACKWARDS)], {}, row({2, 7})),
    "one of two replicas in VRAM": (lambda: [first(2, experts=[*range(E), 0])], {}, row({1}, {0})),
    "blocks of two pages, experts of three": (
        lambda: [first(3, memory=EmulatedMemory(2 * PAGE_BYTES), expert_bytes=3 * PAGE_BYTES)],
        {},
        row({0, 1, 2}, {3}),
    ),
}


@pytest.mark.parametrize("name", MAPS)
def test_the_map_shows_where_each_expert_is(name):
    statuses, state, expected = MAPS[name]
    chart = module._map(info(*statuses(), **state))
    assert [text.get_text() for text in chart().axes[0].get_yticklabels()] == ["1", "2", "3"]
    assert [cells.tolist() for cells in cells_of(chart, KINDS)] == [[expected] * LAYERS] * 2


def test_a_report_says_if_ranks_are_not_shown():
    shown = {"ep": TWO, "pp": {"pp_size": 2}, "dp": {**TWO, "dp_size": 2, "enable_dp_attention": True}}
    one, two = (manual("1,4,6", ep_rank=rank, ep_size=2) for rank in (0, 1))
    assert ONE_OF_SEVERAL in page(one, **shown["ep"])
    assert ONE_OF_SEVERAL in page(one, **shown["pp"])
    assert ONE_OF_SEVERAL not in page(one, two, **shown["dp"])


def test_many_ranks_have_a_column_each_and_the_first_ones_a_line():
    statuses = [stepped(Rank(config()), steps) for steps in range(1, 11)]
    assert figures_of(*statuses, dp_size=10)["tokens"] == [str(5 + 2 * steps) for steps in range(1, 11)]
    said = page(*statuses, dp_size=10)
    assert "Charts over time show the first 8 of 10 ranks." in said
    assert said.count("rank 7") == 1 + 2 * 3, "its column, and in three charts of two widths"
    assert said.count("rank 8") == 1
    ranks = [(str(index), rank) for index, rank in enumerate(info(*statuses).ranks)]
    lines = module._bytes_over_time(ranks)().axes[0].lines
    assert [line.get_ydata()[0] * 2**10 for line in lines] == [
        pytest.approx(rank.history.zero_copy_bytes[-1] / rank.history.steps[-1]) for _, rank in ranks
    ]


def test_beside_other_ranks_a_rank_has_fewer_samples_of_the_same_totals():
    status = stepped(Rank(config()))
    status["history"] = {name: [*range(200)] for name in status["history"]}
    (rank,) = info(status).ranks
    assert module._drawn(rank, 1) is rank
    past = module._drawn(rank, 2).history
    assert past.seconds == past.moves == [*range(0, 199, 4), 199]


def test_experts_that_are_in_vram_in_part_count_by_their_bytes():
    """Blocks of two pages, experts of three: of the fourth a third is beside the third."""
    rank = Rank(config(), EmulatedMemory(2 * PAGE_BYTES), expert_bytes=3 * PAGE_BYTES)
    for ids in ([[0]], [[0]], [[3]], [[3, 3]]):
        rank.step(ids)
    # Of 5 routed tokens two were served whole and three by a third; of 4 activations two and two.
    figures = figures_of(rank.status())
    assert (figures["hit rate"], figures["hit rate of bytes"]) == (["60.0 %"], ["66.7 %"])


def test_hit_rate_by_layer_is_over_all_ranks():
    cold, hot = Rank(config()), Rank(config())
    for _ in range(4):
        cold.step([[7, 6]])
        hot.step([[0, 1]])
    figure = module._layers_chart(info(cold.status(), hot.status()).ranks)()
    assert [bar.get_height() for bar in figure.axes[0].patches] == [50, 50, 50]
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["1", "2", "3"]


@pytest.mark.parametrize(("seconds", "text"), [(119, "119 seconds"), (150, "2.5 minutes"), (2e5, "2.3 days")])
def test_durations_are_in_the_largest_unit_of_which_there_are_two(seconds, text):
    assert duration(seconds) == text


# Replays


def test_a_report_of_a_replay_shows_every_policy_in_every_picture():
    said = words(replay_report(replayed(result("lru"), result("belady", hit_rate=0.95), result("adaptive<b>")), "r.json"))
    assert "trace t.npz" in said
    for policy in ("lru", "belady", "adaptive<b>"):
        assert f"{policy} {'95.0 %' if policy == 'belady' else '80.0 %'} 2.000 ms" in said
        assert said.count(policy) >= 5
    for shown in ("95.0 %", "0.250", "3.0 MiB", "1.0 MiB", "2.000 ms", "MiB a decode step"):
        assert shown in said


def test_a_report_of_a_replay_says_what_was_scored_and_assumed():
    content = json.loads(msgspec.json.encode(replayed(result("lru"))))
    assert "GB/s" not in words(replay_report(msgspec.convert(content, ReplayResults), "r"))
    scored = {"requests": 3, "steps": 9, "warmup_requests": 2, "warmup_steps": 5, "link_gbps": 55.0, "link_assumed": True}
    scored |= {"layers": 2, "num_experts": 8, "num_resident": 4, "residency": 0.5, "batch": 1}
    content["scored"] = scored | {"expert_bytes": 1 << 20, "expert_bytes_assumed": False, "shipped": "adaptive"}
    said = words(replay_report(msgspec.convert(content, ReplayResults), "r"))
    assert "scored 3 requests in 9 decode steps warm-up 2 requests in 5 decode steps link 55 GB/s, assumed" in said


@pytest.mark.parametrize(("layers", "joined"), [(12, False), (13, True)])
def test_few_layers_are_points_and_many_are_lines(layers, joined):
    results = replayed(result("lru", per_layer_hit_rate=[0.5] * layers)).results
    (line,) = replay_module._layers_chart(results)().axes[0].lines
    assert (line.get_linestyle() != "None") == joined

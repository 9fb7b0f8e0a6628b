"""Real SGLang with its experts in unified memory and its default decode and prefill graphs, over the stand-in driver: which
calls are made, what a capture contains, that what a graph reads stays where it was captured, and that a long prompt streams.
The number of residents is the one that fits."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from builders.rooms import fraction
from standin.serving import GPU, captures, kept_links, serve_and_log

from sglang_uvm_offload.memory.layout import BLOCK_BYTES

LAYERS, EXPERTS, RESIDENT = 5, 16, 4
CACHE_TOKENS = GPU["max_total_tokens"]
EXPERT_BYTES = (512 << 10, 256 << 10)
"""w13 and w2, allocated layer by layer: blocks of 4 and of 8 experts."""
FIRST = 9
"""Every token picks the experts from this one on. Three of them are in one block of w13, all in one of w2."""
SHORT, LONG = "hello world", "the quick brown fox jumps over the lazy dog " * 3
"""The one is prefilled in a graph, the other streams."""
STREAM_TOKENS = 16
BUFFERS = 2 * EXPERTS * sum(EXPERT_BYTES)
HOT = (2, 1)
"""These blocks; at first only the first one of each tensor is resident."""


IN_PIECES = """
from pathlib import Path
from sglang_uvm_offload.memory import host_pages
host_pages.BUDDYINFO = Path({file!r})
"""
"""A machine whose free memory has no stretch of 2 MiB."""


@pytest.fixture(scope="module")
def served(tmp_path_factory, checkpoints, standin) -> tuple[dict, list[dict]]:
    """An engine that answered a short and a long prompt, for which it needed prefill and decode steps, and its CUDA calls."""
    folder = tmp_path_factory.mktemp("served")
    model = checkpoints("qwen3_moe", expert_size=512, layers=LAYERS)
    offload = {"expert_offload_num_resident": "auto", "expert_offload_headroom_gb": 0.0, "expert_offload_warmup_tokens": 16}
    offload |= {"expert_offload_trace": str(folder / "trace.npz"), "expert_offload_stream_buffer_gb": BUFFERS / 2**30}
    offload |= {"expert_offload_stream_tokens": STREAM_TOKENS, "expert_offload_slots": 0}
    offload |= {"mem_fraction_static": fraction(model, RESIDENT, CACHE_TOKENS, BUFFERS, LAYERS, measured=True)}
    job = {
        "engine": {"model_path": str(model), **GPU, **offload},
        "prompts": [SHORT, LONG],
        "max_new_tokens": 24,
    }
    (folder / "buddyinfo").write_text("Node 0, zone Normal 9999 0 0 0 0 0 0 0 0 0 0\n")
    pieces = IN_PIECES.format(file=str(folder / "buddyinfo"))
    return serve_and_log(job, FIRST, standin.library, folder / "run", plugin=pieces, env={"STANDIN_LINK": "36,35,33,52"})


@pytest.fixture(scope="module")
def calls(served) -> list[dict]:
    return served[1]


def named(calls: list[dict], *names: str) -> list[dict]:
    return [call for call in calls if call["call"] in names]


def managed_ranges(calls: list[dict]) -> list[range]:
    """The experts. A block to compare reads with comes once the server is ready."""
    loaded = calls.index(named(calls, "cudaStreamBeginCapture")[0])
    taken = named(calls[:loaded], "cudaMallocManaged")
    return [range(call["address"], call["address"] + call["nbytes"]) for call in taken]


def test_the_experts_are_managed_and_placed_before_they_are_written(calls):
    assert len(managed_ranges(calls)) == 2 * LAYERS
    placing = calls[: calls.index(named(calls, "cudaStreamBeginCapture")[0])]
    for it, expert_bytes in zip(managed_ranges(calls), EXPERT_BYTES * LAYERS, strict=True):
        mine = [call for call in named(placing, "cudaMemAdvise", "cudaMemPrefetchAsync") if call["address"] in it]
        assert (mine[0]["advice"], mine[0]["nbytes"]) == ("SetAccessedBy", len(it))
        moved = {call["location"]: call["nbytes"] for call in named(mine, "cudaMemPrefetchAsync")}
        assert moved == {"device": BLOCK_BYTES, "host": EXPERTS * expert_bytes - BLOCK_BYTES}
        preferred = [(call["location"], call["nbytes"]) for call in mine if call.get("advice") == "SetPreferredLocation"]
        assert preferred == [("host", EXPERTS * expert_bytes), ("device", BLOCK_BYTES)]


def test_host_pages_are_populated_before_the_link_is_measured_on_a_stream_of_their_own(calls):
    measured = calls.index(next(call for call in calls if call.get("kernel") == "uvm_read_kernel"))
    ranges = managed_ranges(calls)
    moves = [call for call in named(calls[:measured], "cudaMemPrefetchAsync") if any(call["address"] in it for it in ranges)]
    populated = [call for call in moves if call["location"] == "host"]
    assert sum(call["nbytes"] for call in populated) == EXPERTS * sum(EXPERT_BYTES) * LAYERS - len(ranges) * BLOCK_BYTES
    (stream,) = {call["stream"] for call in populated}
    assert stream not in {call["stream"] for call in moves if call["location"] == "device"}


def test_the_link_is_measured_once_loaded_and_is_in_the_log_the_status_and_the_cache(served, calls, standin):
    result, _ = served
    told = "this machine reads offloaded experts at 35.0 GB/s, 51.7 expected: scattered reads 35.0 GB/s, sequential 36.0, "
    assert result["log"].count(told) == 1
    assert result["log"].count("reads of offloaded experts are slow: kernels read more slowly than the copy engine") == 1
    link = result["server_info"]["internal_states"][0]["expert_offload"]["link"]
    assert link["measured"]["together"]["scattered"] == pytest.approx(35.0, rel=1e-4)
    assert (link["measured"]["ranks"], len(link["because"])) == (1, 1)
    folder = kept_links({"XDG_CACHE_HOME": str(standin.library.parent / "caches")})
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["link"] == link["measured"]
    timed = [call for call in calls if call.get("kernel") == "uvm_read_kernel"]
    loaded = calls.index(named(calls, "cudaStreamBeginCapture")[0])
    assert timed
    assert calls.index(timed[-1]) < loaded
    shutil.rmtree(folder)  # later tests serve on other machines


def kernels(calls: list[dict]) -> list[str]:
    return [call["kernel"] for call in calls if "kernel" in call]


def test_the_file_cache_of_the_checkpoint_is_given_back_where_moves_would_get_small_pages(served):
    result, _ = served
    assert len(re.findall(r"dropped the checkpoint from the page cache \([\d.]+ [MG]iB\)", result["log"])) == 1


@pytest.mark.works("Launch", "default decode and prefill CUDA graphs, overlap scheduling, radix cache")
def test_decode_graphs_of_both_batches_and_prefill_graphs_below_the_threshold_are_captured(served, calls):
    result, _ = served
    layers = [kernels(capture).count("fused_moe_kernel") // 2 for capture in captures(calls)]
    assert layers.count(LAYERS) == 2  # decode: batches of 1 and of 2
    assert layers.count(1) == 3 * LAYERS  # prefill: of 4, 8 and 12 tokens, broken at the attention of each layer
    assert sum(layers) == 5 * LAYERS
    assert "prefill CUDA graphs are captured for up to 12 tokens instead of 2048" in result["log"]


@pytest.mark.since("0.5.22", "torch 2.13 waits for another stream as a capture begins")
def test_a_capture_of_the_last_layer_counts_all_and_nothing_else_of_ours_is_captured(calls):
    counted = []
    for capture in captures(calls):
        ours = [call for call in capture if call.get("kernel", "").startswith("uvm_")]
        assert {call["kernel"] for call in ours} <= {"uvm_count_routing_kernel"}
        counted.append([call["blocks"] for call in ours])
        forbidden = {"cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaMemRangeGetAttribute", "cudaFree"}
        forbidden |= {"cudaStreamSynchronize", "cudaDeviceSynchronize"}
        assert not forbidden & {call["call"] for call in capture}
        assert {call["graph"] for call in capture if "graph" in call} == {capture[0]["graph"]}
    # Two decode graphs, and three of prefill in as many parts as there are layers.
    assert counted.count([LAYERS]) == 5
    assert counted.count([]) == len(counted) - 5


def test_a_capture_holds_one_copy_of_a_layers_ids_and_of_each_guess_of_the_next_two(calls):
    """To 16 bits, which nothing else of SGLang's copies to."""
    found = {0: [], 1: [], LAYERS: []}
    for capture in captures(calls):
        copies = [kernel for kernel in kernels(capture) if "direct_copy_kernel_cuda" in kernel and "EUlsE_" in kernel]
        found[kernels(capture).count("fused_moe_kernel") // 2].append(len(copies))
    of_layer = [1 + min(2, LAYERS - 1 - layer) for layer in range(LAYERS)]
    assert set(found[0]) == {0}
    assert sorted(found[1]) == sorted(3 * of_layer)
    assert found[LAYERS] == 2 * [sum(of_layer)]


def test_graphs_read_the_experts_where_they_stay(calls):
    """A graph reads what it captured: so each expert tensor it captured is a managed range that is never given back."""
    weights = {it.start for it in managed_ranges(calls)}
    for capture in captures(calls):
        read = [call["arguments"][1] for call in capture if call.get("kernel") == "fused_moe_kernel"]
        assert set(read) <= weights
        assert len(read) != 2 * LAYERS or set(read) == weights
    replays = named(calls, "cudaGraphLaunch")
    assert len(replays) >= 40
    end = calls.index(replays[-1])
    assert not [call for call in named(calls[:end], "cudaFree") if call["managed"]]
    first = calls.index(replays[0])
    assert not named(calls[first:end], "cudaMallocManaged")
    long_prompt = copies_at(calls)
    decoding = next(i for i in replays_at(calls) if i > long_prompt[-1])
    assert not named(calls[decoding:end], "cudaMalloc")


def copies_at(calls: list[dict]) -> list[int]:
    """Where layers are copied into stream buffers. Copies before the first capture time the link."""
    begin = calls.index(named(calls, "cudaStreamBeginCapture")[0])
    return [i for i, call in enumerate(calls) if i > begin and call.get("kernel") == "uvm_copy_kernel"]


def replays_at(calls: list[dict]) -> list[int]:
    return [i for i, call in enumerate(calls) if call["call"] == "cudaGraphLaunch"]


def test_a_long_prompt_computes_from_buffers_one_layer_ahead_of_the_copies(served, calls):
    """And nothing else is copied or streamed: the short prompt and decode steps replay graphs."""
    result, _ = served
    state = result["server_info"]["internal_states"][0]["expert_offload"]
    assert state["streaming"] == {"buffers": 2, "nbytes": BUFFERS, "min_tokens": STREAM_TOKENS, "fault": None}
    copies = copies_at(calls)
    assert len(copies) == LAYERS
    eager = [call for call in calls[copies[0] :] if call.get("kernel") == "fused_moe_kernel"]
    read = [call["arguments"][1] for call in eager]
    managed = managed_ranges(calls)
    assert not any(address in it for address in read for it in managed)
    assert len(read) == 2 * LAYERS
    assert read[:2] == read[4:6]  # layers take turns at two buffers
    assert len({*read}) == 4
    first, second = (calls.index(eager[2 * layer]) for layer in (0, 1))
    assert copies[0] < copies[1] < first < copies[2] < second
    assert len({calls[i]["stream"] for i in copies}) == 1
    assert calls[copies[0]]["stream"] != eager[0]["stream"]


def test_the_picked_experts_move_in_between_replays_without_a_new_address(served, calls):
    first_replay = calls.index(named(calls, "cudaGraphLaunch")[0])
    moving = named(calls[first_replay:], "cudaMemAdvise", "cudaMemPrefetchAsync")
    for it, hot in zip(managed_ranges(calls), HOT * LAYERS, strict=True):
        mine = [call for call in moving if call["address"] in it]
        assert [(call.get("advice", "prefetch"), call["location"]) for call in mine] == [
            ("SetPreferredLocation", "host"),
            ("prefetch", "host"),
            ("prefetch", "device"),
            ("SetPreferredLocation", "device"),
        ]
        assert {call["address"] for call in mine[:2]} == {it.start}
        assert {call["address"] for call in mine[2:]} == {it.start + hot * BLOCK_BYTES}
        assert {call["nbytes"] for call in mine} == {BLOCK_BYTES}
    replays = replays_at(calls)
    moves = [calls.index(call) for call in moving]
    assert replays[0] < moves[0]
    assert moves[-1] < replays[-1]


@pytest.mark.since("0.5.22", "it computes a step more than a request has tokens")
def test_the_engine_reports_what_it_counted(served):
    result, _ = served
    state = result["server_info"]["internal_states"][0]["expert_offload"]
    assert [len(answer["output_ids"]) for answer in result["answers"]] == [24, 24]
    assert state["num_layers"] == LAYERS
    assert (state["resident_experts"], state["partly_resident_experts"]) == (LAYERS * RESIDENT, LAYERS * RESIDENT)
    assert state["resident_bytes"] == LAYERS * 2 * BLOCK_BYTES
    recorded = {name: state["trace"][name] for name in ("tokens", "requests", "dropped_steps", "stopped")}
    assert recorded == {"tokens": 46, "requests": 2, "dropped_steps": 0, "stopped": False}


def test_the_scheduler_gets_the_number_that_fits_and_the_cache_its_tokens(served, calls):
    """All calls succeed, torch is bounded once, and residents are looked for before the first step."""
    result, _ = served
    assert [call for call in calls if call["result"] != 0] == []
    assert result["server_info"]["expert_offload_num_resident"] == str(RESIDENT)
    assert result["server_info"]["max_total_num_tokens"] == CACHE_TOKENS
    assert f"--expert-offload-num-resident auto: {RESIDENT} of {EXPERTS} experts a layer fit" in result["log"]
    assert result["log"].count("torch's allocator is limited to") == 1
    looks = [i for i, call in enumerate(calls) if call.get("kernel") == "uvm_time_reads_kernel"]
    assert looks[0] < calls.index(named(calls, "cudaGraphLaunch")[0])
    assert result["server_info"]["internal_states"][0]["expert_offload"]["evicted_bytes"] == 0

"""Real SGLang with its experts in unified memory and its decode steps in CUDA graphs, over the stand-in driver: which calls
are made, what a capture contains, and that what a graph reads stays where it was captured. The number of residents is the
one that fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.rooms import LAYERS, fraction
from standin.build import sglang_environment
from standin.engine import run_engine

from sglang_uvm_offload.memory.layout import BLOCK_BYTES

EXPERTS, RESIDENT, TOP_K = 16, 4, 4
CACHE_TOKENS = 2048
EXPERT_BYTES = (512 << 10, 256 << 10)
"""Of w13 and of w2, which are allocated by turns, a layer after the other: blocks of 4 and of 8 experts."""
FIRST = 9
"""Every token picks the experts from this one on. Three of them are in one block of w13, all in one of w2."""
HOT = (2, 1)
"""These blocks; at first only the first one of each tensor is resident."""

GPU = {
    "device": "cuda",
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "grammar_backend": "none",
    "disable_cuda_graph": False,
    "disable_prefill_cuda_graph": True,
    "cuda_graph_max_bs_decode": 2,
    "max_running_requests": 2,
    "max_total_tokens": CACHE_TOKENS,
    "sampling_backend": "pytorch",
    "random_seed": 1,
    "skip_server_warmup": True,
    "log_level": "info",
}


@pytest.fixture(scope="module")
def served(tmp_path_factory, checkpoints, standin) -> tuple[dict, list[dict]]:
    """An engine that answered one request, of which it needed a prefill and decode steps, and its CUDA calls."""
    folder = tmp_path_factory.mktemp("served")
    environment = sglang_environment(standin.library.parent, folder / "calls.jsonl", folder / "caches")
    environment |= {"STANDIN_FIRST_EXPERT": str(FIRST), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["STANDIN_LATE"] = "2"  # the stream of SGLang's steps, and that of the copies of counts
    model = checkpoints("qwen3_moe", expert_size=512)
    offload = {"expert_offload_num_resident": "auto", "expert_offload_headroom_gb": 0.0, "expert_offload_warmup_tokens": 16}
    offload |= {"expert_offload_trace": str(folder / "trace.npz")}
    offload |= {"mem_fraction_static": fraction(model, RESIDENT, CACHE_TOKENS)}
    job = {
        "engine": {"model_path": str(model), **GPU, **offload},
        "prompts": ["hello world"],
        "max_new_tokens": 24,
    }
    result = run_engine(job, folder, environment, seconds=900) | {"log": (folder / "log.txt").read_text()}
    calls = [json.loads(line) for line in Path(folder / "calls.jsonl").read_text().splitlines()]
    # The try of unified memory runs in a process of its own, which captures nothing.
    (served_by,) = {call["pid"] for call in calls if call["call"] == "cudaStreamBeginCapture"}
    return result, [call for call in calls if call["pid"] == served_by]


@pytest.fixture(scope="module")
def calls(served) -> list[dict]:
    return served[1]


def named(calls: list[dict], *names: str) -> list[dict]:
    return [call for call in calls if call["call"] in names]


def captures(calls: list[dict]) -> Iterator[list[dict]]:
    """The calls from each begin of a capture to its end."""
    start = None
    for i, call in enumerate(calls):
        if call["call"] == "cudaStreamBeginCapture":
            start = i
        elif call["call"] == "cudaStreamEndCapture":
            assert start is not None
            yield calls[start : i + 1]


def managed_ranges(calls: list[dict]) -> list[range]:
    """The experts. A block to compare reads with comes once the server is ready."""
    loaded = calls.index(named(calls, "cudaStreamBeginCapture")[0])
    taken = named(calls[:loaded], "cudaMallocManaged")
    return [range(call["address"], call["address"] + call["nbytes"]) for call in taken]


def test_all_calls_succeed(calls):
    assert [call for call in calls if call["result"] != 0] == []


def test_the_experts_are_managed_and_placed_before_they_are_written(calls):
    assert len(managed_ranges(calls)) == 2 * LAYERS
    placing = calls[: calls.index(named(calls, "cudaStreamBeginCapture")[0])]
    for it, expert_bytes in zip(managed_ranges(calls), EXPERT_BYTES * LAYERS, strict=True):
        mine = [call for call in named(placing, "cudaMemAdvise", "cudaMemPrefetchAsync") if call["address"] in it]
        assert (mine[0]["advice"], mine[0]["nbytes"]) == ("SetAccessedBy", len(it))
        moved = {call["location"]: call["nbytes"] for call in named(mine, "cudaMemPrefetchAsync")}
        assert moved == {"device": BLOCK_BYTES, "host": EXPERTS * expert_bytes - BLOCK_BYTES}
        preferred = [call for call in mine if call.get("advice") == "SetPreferredLocation"]
        assert {call["location"]: call["nbytes"] for call in preferred} == moved


def test_a_capture_holds_the_counters_and_nothing_else_of_ours(calls):
    found = list(captures(calls))
    assert len(found) == 2  # batches of 1 and of 2
    for capture in found:
        kernels = [call.get("kernel", "") for call in capture]
        assert kernels.count("fused_moe_kernel") == 2 * LAYERS
        assert [kernel for kernel in kernels if kernel.startswith("uvm_")] == ["uvm_count_routing_kernel"] * LAYERS
        forbidden = {"cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaMemRangeGetAttribute", "cudaFree"}
        forbidden |= {"cudaStreamSynchronize", "cudaDeviceSynchronize"}
        assert not forbidden & {call["call"] for call in capture}
        assert {call["graph"] for call in capture if "graph" in call} == {capture[0]["graph"]}


def test_a_capture_holds_one_copy_of_ids_a_layer(calls):
    """To 16 bits, which nothing else of SGLang's copies to."""
    for capture in captures(calls):
        copies = [call["kernel"] for call in capture if "direct_copy_kernel_cuda" in call.get("kernel", "")]
        assert len([kernel for kernel in copies if "EUlsE_" in kernel]) == LAYERS


def test_graphs_read_the_experts_where_they_stay(calls):
    """A graph reads what it captured: so each expert tensor it captured is a managed range that is never given back."""
    weights = managed_ranges(calls)
    for capture in captures(calls):
        read = [call["arguments"][1] for call in capture if call.get("kernel") == "fused_moe_kernel"]
        assert sorted(read) == sorted(it.start for it in weights)
    replays = named(calls, "cudaGraphLaunch")
    assert len(replays) >= 20
    end = calls.index(replays[-1])
    assert not [call for call in named(calls[:end], "cudaFree") if call["managed"]]
    first = calls.index(replays[0])
    assert not named(calls[first:end], "cudaMallocManaged", "cudaMalloc")


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
    replays = [i for i, call in enumerate(calls) if call["call"] == "cudaGraphLaunch"]
    moves = [calls.index(call) for call in moving]
    assert replays[0] < moves[0]
    assert moves[-1] < replays[-1]


def test_torch_is_bounded_once_after_the_cache_is_there(served):
    result, _ = served
    assert result["log"].count("torch frees its cache before it takes more than") == 1


def test_residents_are_looked_for_before_the_first_step(served, calls):
    result, _ = served
    looks = [i for i, call in enumerate(calls) if call.get("kernel") == "uvm_time_reads_kernel"]
    assert looks[0] < calls.index(named(calls, "cudaGraphLaunch")[0])
    assert result["server_info"]["internal_states"][0]["expert_offload"]["evicted_bytes"] == 0


def test_the_engine_reports_what_it_counted(served):
    result, _ = served
    state = result["server_info"]["internal_states"][0]["expert_offload"]
    assert len(result["answers"][0]["output_ids"]) == 24
    assert state["num_layers"] == LAYERS
    assert (state["resident_experts"], state["partly_resident_experts"]) == (LAYERS * RESIDENT, LAYERS * RESIDENT)
    assert state["resident_bytes"] == LAYERS * 2 * BLOCK_BYTES
    recorded = {name: state["trace"][name] for name in ("tokens", "requests", "dropped_steps", "stopped")}
    assert recorded == {"tokens": 23, "requests": 1, "dropped_steps": 0, "stopped": False}


def test_the_scheduler_gets_the_number_that_fits_and_the_cache_its_tokens(served):
    result, _ = served
    assert result["server_info"]["expert_offload_num_resident"] == str(RESIDENT)
    assert result["server_info"]["max_total_num_tokens"] == CACHE_TOKENS
    told = f"--expert-offload-num-resident auto: {RESIDENT} of {EXPERTS} experts a layer fit"
    assert told in result["log"]

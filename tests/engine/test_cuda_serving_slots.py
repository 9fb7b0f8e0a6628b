"""Real SGLang with slots and its default decode graphs, over the stand-in driver: what a capture holds, and that what a graph
captured once serves and fills the slots at each replay."""

from __future__ import annotations

from itertools import pairwise

import pytest
from builders.rooms import fraction
from standin.serving import GPU, captures, serve_and_log

from sglang_uvm_offload.memory.layout import BLOCK_BYTES, whole_blocks

LAYERS, EXPERTS, RESIDENT, SLOTS, TOP_K = 3, 16, 4, 4, 4
"""There is room for eight rows a layer, of which ``auto`` makes half slots. Those of w2 begin a block of their own."""
FIRST = 9
"""Every token picks the experts from this one on, of which none is resident."""
TOKENS = 20
LAYER = ["uvm_resolve_slots_kernel", "uvm_fill_slots_kernel", "fused_moe_kernel", "fused_moe_kernel"]
"""The kernels of one, of these, in the order of their capture. What fills slots is on a stream of its own."""

OFFLOAD = {
    "expert_offload_num_resident": "auto",
    "expert_offload_resident_selection": "first_n",
    "expert_offload_slots": "auto",
    "expert_offload_stream_tokens": "inf",
    "expert_offload_headroom_gb": 0.0,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory, checkpoints, standin) -> tuple[dict, list[dict]]:
    """What an engine answered, one request after the other, and its CUDA calls."""
    folder = tmp_path_factory.mktemp("served")
    model = checkpoints("qwen3_moe", expert_size=512, layers=LAYERS)
    room = fraction(model, RESIDENT + SLOTS, GPU["max_total_tokens"], LAYERS * BLOCK_BYTES, LAYERS, measured=True)
    job = {
        "engine": {"model_path": str(model), **GPU, "mem_fraction_static": room, **OFFLOAD},
        "prompts": ["hello", "hello world"],
        "max_new_tokens": TOKENS,
    }
    return serve_and_log(job, FIRST, standin.library, folder)


@pytest.fixture(scope="module")
def calls(served) -> list[dict]:
    return served[1]


@pytest.mark.since("0.5.22", "torch 2.13 waits for another stream as a capture begins")
def test_each_captured_layer_resolves_its_slots_before_its_first_kernel(calls):
    layers, by_sglang = 0, set()
    for capture in captures(calls):
        ran = [call["kernel"] for call in capture if "kernel" in call]
        if "fused_moe_kernel" not in ran:
            continue  # a rank's trial of what slots overlap
        ours = [name for name in ran if name in LAYER]
        assert ours == LAYER * (len(ours) // len(LAYER))
        by_sglang.add(any("moe_align" in name for name in ran))
        layers += len(ours) // len(LAYER)
        forbidden = {"cudaMallocManaged", "cudaMemAdvise", "cudaMemPrefetchAsync", "cudaFree"}
        forbidden |= {"cudaStreamSynchronize", "cudaDeviceSynchronize"}
        assert not forbidden & {call["call"] for call in capture}
        assert "uvm_begin_step_kernel" not in ran
    assert False in by_sglang, "the slots' kernel aligns few ids"
    assert layers >= 2 * LAYERS  # decode graphs of two batches, and those of prefills


@pytest.mark.since("0.5.22", "it computes a step more than a request has tokens")
def test_a_step_begins_by_one_launch_outside_of_its_graph(calls):
    graphs = [i for i, call in enumerate(calls) if call["call"] == "cudaGraphLaunch"][-(TOKENS - 2) :]
    begun = [i for i, call in enumerate(calls) if call.get("kernel") == "uvm_begin_step_kernel"]
    assert all(len([i for i in begun if before < i < graph]) == 2 for before, graph in pairwise(graphs)), "one ends the last"


def test_a_replayed_graph_fills_each_expert_once_and_serves_it_from_then_on(served):
    result, _ = served
    state = result["server_info"]["internal_states"][0]["expert_offload"]
    slots = state["slots"]
    assert slots["missing"] is None
    assert slots["fills"] == LAYERS * TOP_K
    decoded = 2 * (TOKENS - 1)
    assert slots["hits"] >= LAYERS * TOP_K * decoded
    assert slots["bypasses"] == 0, "the first prefill fills them"
    assert slots["brought"] == 0
    assert slots["filled_bytes"] == slots["fills"] * state["layers"][0]["expert_bytes"]
    assert all(answer["meta_info"]["completion_tokens"] == TOKENS for answer in result["answers"])


def test_auto_divides_the_room_that_it_finds(served):
    result, _ = served
    assert result["server_info"]["expert_offload_num_resident"] == str(RESIDENT)
    assert result["server_info"]["expert_offload_slots"] == str(SLOTS)
    told = f"{RESIDENT + SLOTS} of {EXPERTS} experts a layer fit in VRAM, {SLOTS} of them as slots"
    assert told in result["log"]


def test_slots_lie_behind_the_experts_of_all_layers_and_prefer_the_gpu(calls):
    """Before a model is built, nothing says how many slots ``auto`` will make: there are addresses for as many as experts."""
    loaded = next(i for i, call in enumerate(calls) if call["call"] == "cudaStreamBeginCapture")
    ranges = [call for call in calls[:loaded] if call["call"] == "cudaMallocManaged"]
    assert len(ranges) == 2 * LAYERS + 2, "those of a layer are left for those of all"
    for taken, expert_bytes in zip(ranges[-2:], (256 << 10, 512 << 10), strict=True):
        experts = LAYERS * EXPERTS * expert_bytes
        assert taken["nbytes"] == whole_blocks(3 * experts), "as many rows from each layer on"
        moved = [call for call in calls[:loaded] if call["call"] == "cudaMemPrefetchAsync"]
        (slots,) = (call for call in moved if call["address"] == taken["address"] + experts)
        assert (slots["location"], slots["nbytes"]) == ("device", whole_blocks(LAYERS * SLOTS * expert_bytes))

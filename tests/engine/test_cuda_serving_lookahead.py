"""Real SGLang whose slots look ahead, with its default decode graphs, over the stand-in driver: what a capture holds, and that
the server answers."""

from __future__ import annotations

import pytest
from builders.rooms import fraction
from standin.order import Order
from standin.serving import GPU, captures, serve_and_log
from standin.shuffled import named

from sglang_uvm_offload.memory.layout import BLOCK_BYTES

LAYERS, SLOTS, TOKENS = 11, 6, 6
OFFLOAD = {
    "expert_offload_num_resident": 0,
    "expert_offload_slots": SLOTS,
    "expert_offload_stream_tokens": "inf",
    "expert_offload_prefetch": "speculative",
    "expert_offload_headroom_gb": 0.0,
}
RESOLVE, FILL, CHOOSE, COPY, GEMM = LAYER = (
    *("uvm_resolve_slots_kernel", "uvm_fill_slots_kernel", "uvm_choose_ahead_kernel", "uvm_copy_ahead_kernel"),
    "fused_moe_kernel",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory, checkpoints, standin) -> tuple[dict, list[dict]]:
    model = checkpoints("qwen3_moe", expert_size=512, layers=LAYERS)
    room = fraction(model, SLOTS, GPU["max_total_tokens"], LAYERS * BLOCK_BYTES, LAYERS)
    job = {
        "engine": {"model_path": str(model), **GPU, "mem_fraction_static": room, **OFFLOAD},
        "prompts": ["hello"],
        "max_new_tokens": TOKENS,
    }
    return serve_and_log(job, 9, standin.library, tmp_path_factory.mktemp("served"), env={"STANDIN_LOG_ORDER": "1"})


def test_a_capture_holds_what_comes_ahead_beside_each_layer_and_waits_for_it_at_last(served):
    _, calls = served
    checked = 0
    for capture in captures(calls):
        ours = named(capture, *LAYER)
        if sum(call["kernel"] == GEMM for call in ours) != 2 * LAYERS:
            continue
        graph = capture[-1]["graph"]
        order, decodes = Order(calls, graph), any(call["kernel"] == COPY for call in ours)
        layer = [RESOLVE, FILL, CHOOSE, COPY, GEMM, GEMM] if decodes else [RESOLVE, FILL, GEMM, GEMM]
        last = [RESOLVE, FILL, GEMM, GEMM]
        assert [call["kernel"] for call in ours] == layer * (LAYERS - 1) + last
        checked += decodes
        resolves, copies = ([call for call in ours if call["kernel"] == kernel] for kernel in (RESOLVE, COPY))
        seconds = [call for call in ours if call["kernel"] == GEMM][1::2]
        for copy, mine, following, second in zip(copies, resolves, resolves[1:], seconds[1:], strict=False):
            assert copy["stream"] != mine["stream"]
            assert order.happens_before(mine, copy)
            assert not order.happens_before(copy, following)
            assert order.happens_before(copy, second), "so that the capture ends with all that it forked"
    assert checked >= 2, "decode graphs of two batches"


def test_the_server_answers_and_tells_what_came_ahead(served):
    result, _ = served
    state = result["server_info"]["internal_states"][0]["expert_offload"]
    assert state["lookahead"].keys() == {"misses", "brought", "right"}
    assert state["slots"]["missing"] is None
    assert "slot lookahead stopped" not in result["log"]
    assert all(answer["meta_info"]["completion_tokens"] == TOKENS for answer in result["answers"])

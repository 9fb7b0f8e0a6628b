"""Two ranks among which SGLang rearranges the experts while they serve (EPLB): offloading goes along with it.

In float32. After a rearrangement other experts are added up on each rank first, so answers without EPLB are close, not equal.
"""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, Result, assert_offloaded, assert_same_answers, assert_streamed

EXPERTS, REDUNDANT, LAYERS = 16, 2, 3
COMMON: dict[str, Any] = {
    "prompts": PROMPTS[:2],
    "max_new_tokens": 8,
    "dtype": "float32",
    "tp_size": 2,
    "ep_size": 2,
}
EPLB: dict[str, Any] = {
    "enable_eplb": True,
    "ep_num_redundant_experts": REDUNDANT,
    "eplb_rebalance_num_iterations": 4,
    "expert_distribution_recorder_buffer_size": 4,
}
FREQUENCY = {"expert_offload_warmup_tokens": 8}
FLAGS: dict[str, dict[str, Any]] = {
    "continuous": {"expert_offload_adapt": "continuous", **FREQUENCY},
    "frequency": FREQUENCY,
    "a layer at a time": {"eplb_rebalance_layers_per_chunk": 1, **FREQUENCY},
    "first_n": {"expert_offload_resident_selection": "first_n"},
}


def offloaded(engines: Engines, checkpoints: Checkpoints, flags: dict[str, Any]) -> Result:
    on = engines.run(
        checkpoints("qwen3_moe", dtype="float32"),
        **COMMON,
        **EPLB,
        **flags,
        expert_offload_num_resident=EXPERTS // 2,
        expert_offload_stream_tokens=6,
        log_level="info",
    )
    assert on.log.count("[EPLBManager] rebalance end") > 2, "the two ranks rearranged experts once, or not at all"
    assert_offloaded(on.server_info)
    assert_streamed(on)
    assert on.offload["fault"] is None
    assert on.offload["num_experts"] == LAYERS * (EXPERTS + REDUNDANT) // 2
    assert all(layer["expert_ids"] != [*range(9)] for layer in on.offload["layers"]), "they lie where they did at load"
    return on


@pytest.mark.since("0.5.23", "rearranging experts changes its tokens, with and without offloading")
@pytest.mark.works("Parallel", "--enable-eplb with --ep-num-redundant-experts, TP 2 with EP 2")
def test_rearranged_experts_are_served_and_residents_follow_them(checkpoints: Checkpoints, engines: Engines) -> None:
    on = offloaded(engines, checkpoints, FLAGS["continuous"])
    assert on.offload["moves"] > 0
    assert_same_answers(on, engines.baseline(checkpoints("qwen3_moe", dtype="float32"), **COMMON), 1e-5)


@pytest.mark.nightly
@pytest.mark.works("Parallel", "--enable-eplb with --ep-num-redundant-experts, TP 2 with EP 2")
@pytest.mark.parametrize("flags", FLAGS)
def test_rearranged_experts_answer_exactly_as_without_offloading(
    flags: str, checkpoints: Checkpoints, engines: Engines
) -> None:
    on = offloaded(engines, checkpoints, FLAGS[flags])
    chunks = {name: value for name, value in FLAGS[flags].items() if not name.startswith("expert_offload")}
    assert_same_answers(on, engines.baseline(checkpoints("qwen3_moe", dtype="float32"), **COMMON, **EPLB, **chunks))

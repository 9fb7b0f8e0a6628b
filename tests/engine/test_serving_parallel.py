"""Two ranks: offloaded answers equal those of the same parallelism without offloading.

In float32: the two sides run the same operations, and sums over ranks leave nothing to a rounding of bfloat16.
"""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, assert_offloaded, assert_same_answers, assert_streamed

EXPERTS, LAYERS = 16, 3
MODES: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2, "expert_offload_adapt": "continuous"},
    "tp2_ep2": {"tp_size": 2, "ep_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {"dp_size": 2},
    "dp_attention2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}
ROWS = {
    "tp2": "TP 2",
    "tp2_ep2": "TP 2 with EP 2",
    "pp2": "PP 2",
    "dp2": "DP 2",
    "dp_attention2": "DP attention 2",
}
# With attention data parallelism the rows of idle ranks pad each step as they happen to arrive: SGLang's own log-probabilities
# vary by this from run to run.
TOLERANCE = {"dp_attention2": 1e-5}
COMMON: dict[str, Any] = {"prompts": PROMPTS[:2], "max_new_tokens": 8, "dtype": "float32"}


SHOWN = [pytest.param(mode, marks=[pytest.mark.works("Parallel", ROWS[mode])]) for mode in MODES]


@pytest.mark.parametrize("mode", SHOWN)
def test_offloaded_ranks_give_the_same_tokens_and_logprobs(mode: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    plain = {name: value for name, value in MODES[mode].items() if not name.startswith("expert_offload")}
    off = engines.baseline(checkpoint, **COMMON, **plain)
    on = engines.run(
        checkpoint,
        **COMMON,
        **MODES[mode],
        expert_offload_num_resident=EXPERTS // 2,
        expert_offload_warmup_tokens=16,
        expert_offload_stream_tokens=6,
    )
    assert_offloaded(on.server_info)
    assert_streamed(on)
    assert on.offload["zero_copy_bytes"] > 0, "decode steps read in place"
    assert_same_answers(on, off, TOLERANCE.get(mode, 0.0))
    if mode == "dp2":  # each replica is a server of its own, and reports for itself
        states = [state["expert_offload"] for state in on.server_info["internal_states"]]
        assert [state["offloaded_experts"] for state in states] == [LAYERS * EXPERTS // 2] * 2


CONTINUOUS: dict[str, dict[str, Any]] = {
    "TP 2": {"tp_size": 2},
    "TP 2 with EP 2": {"tp_size": 2, "ep_size": 2},
    "PP 2": {"pp_size": 2},
    "DP 2": {"dp_size": 2},
    "DP attention 2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "TP 2 x PP 2": {"tp_size": 2, "pp_size": 2},
    "TP 2 x DP 2": {"tp_size": 2, "dp_size": 2},
}
FOLLOWING = [pytest.param(mode, marks=[pytest.mark.works("Parallel", f"{mode}, continuous")]) for mode in CONTINUOUS]


@pytest.mark.nightly
@pytest.mark.parametrize("mode", FOLLOWING)
def test_ranks_that_follow_the_traffic_stay_alike(mode: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    common = {**COMMON, **CONTINUOUS[mode]}
    off = engines.baseline(checkpoint, **common)
    on = engines.run(
        checkpoint,
        **common,
        expert_offload_num_resident=4,
        expert_offload_warmup_tokens=8,
        expert_offload_adapt="continuous",
    )
    assert on.offload["moves"] > 0
    assert_same_answers(on, off, 1e-5 if mode == "DP attention 2" else 0.0)

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
    "TP 2": {"tp_size": 2},
    "TP 2 with EP 2": {"tp_size": 2, "ep_size": 2},
    "PP 2": {"pp_size": 2},
    "DP 2": {"dp_size": 2},
    "DP attention 2": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "TP 2 x PP 2": {"tp_size": 2, "pp_size": 2},
    "TP 2 x DP 2": {"tp_size": 2, "dp_size": 2},
}
TWO_RANKS = [mode for mode in MODES if " x " not in mode]
# In every run, test_serving_eplb has TP 2 with EP 2, and test_serving_operations DP 2.
EVERY_RUN = ("TP 2", "PP 2", "DP attention 2")
# With attention data parallelism the rows of idle ranks pad each step as they happen to arrive: SGLang's own log-probabilities
# vary by this from run to run.
TOLERANCE = {"DP attention 2": 1e-5}
COMMON: dict[str, Any] = {"prompts": PROMPTS[:2], "max_new_tokens": 8, "dtype": "float32"}


def case(mode: str, row: str, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(mode, marks=[pytest.mark.works("Parallel", row), *marks])


@pytest.mark.parametrize(
    "mode", [case(mode, mode, *(() if mode in EVERY_RUN else [pytest.mark.nightly])) for mode in TWO_RANKS]
)
def test_offloaded_ranks_give_the_same_tokens_and_logprobs(mode: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint, common = checkpoints("qwen3_moe", dtype="float32"), {**COMMON, **MODES[mode]}
    flags: dict[str, Any] = {"expert_offload_adapt": "continuous"} if mode == "TP 2" else {}
    flags |= {"expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": 6}
    on = engines.run(checkpoint, **common, **flags, expert_offload_num_resident=EXPERTS // 2)
    assert_offloaded(on.server_info)
    assert_streamed(on)
    assert on.offload["zero_copy_bytes"] > 0, "decode steps read in place"
    assert_same_answers(on, engines.baseline(checkpoint, **common), TOLERANCE.get(mode, 0.0))
    if mode == "DP 2":  # each replica is a server of its own, and reports for itself
        states = [state["expert_offload"] for state in on.server_info["internal_states"]]
        assert [state["offloaded_experts"] for state in states] == [LAYERS * EXPERTS // 2] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("mode", [case(mode, f"{mode}, continuous") for mode in MODES])
def test_ranks_that_follow_the_traffic_stay_alike(mode: str, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint, common = checkpoints("qwen3_moe", dtype="float32"), {**COMMON, **MODES[mode]}
    flags: dict[str, Any] = {"expert_offload_warmup_tokens": 8, "expert_offload_adapt": "continuous"}
    on = engines.run(checkpoint, **common, **flags, expert_offload_num_resident=4)
    assert on.offload["moves"] > 0
    assert_same_answers(on, engines.baseline(checkpoint, **common), TOLERANCE.get(mode, 0.0))

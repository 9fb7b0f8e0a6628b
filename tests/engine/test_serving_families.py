"""Greedy answers with experts offloaded are SGLang's own, token by token, for every supported architecture."""

from __future__ import annotations

import pytest
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded, assert_same_answers

# Experts and experts a token, as scripts/make_checkpoint.py has them; and what SGLang asks for beside the usual flags.
FAMILIES = {
    "glm4_moe": (16, 4, {}),
    "qwen3_moe": (16, 4, {}),
    "deepseek_v2": (16, 4, {}),
    "deepseek_v3": (16, 4, {}),
    "mixtral": (8, 2, {}),
    "olmoe": (16, 4, {}),
    "dots1": (16, 4, {}),  # through SGLang's Transformers fallback
    "gpt_oss": (8, 2, {"attention_backend": "triton", "moe_runner_backend": "triton"}),
}


# Every family once, and one of them with every share.
CASES = [("glm4_moe", "top_k"), *((family, "half") for family in FAMILIES), ("glm4_moe", "all")]


@pytest.mark.parametrize(("family", "share"), CASES)
def test_offloaded_experts_give_the_same_tokens_and_logprobs(
    family: str, share: str, checkpoints: Checkpoints, engines: Engines
) -> None:
    experts, top_k, needed = FAMILIES[family]
    resident = {"top_k": top_k, "half": experts // 2, "all": experts}[share]
    checkpoint = checkpoints(family)
    off = engines.baseline(checkpoint, **needed)
    # Warm-up ends within the first request: the others are answered after experts have moved.
    on = engines.run(checkpoint, expert_offload_num_resident=resident, expert_offload_warmup_tokens=16, **needed)
    assert_offloaded(on.server_info, everything_resident=resident == experts)
    assert on.offload["warmup_done"]
    assert (on.offload["moves"] > 0) == (resident < experts)
    assert_same_answers(on, off)


def test_residents_that_follow_the_traffic_change_no_token(checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("glm4_moe")
    off = engines.baseline(checkpoint, max_new_tokens=48)
    on = engines.run(
        checkpoint,
        max_new_tokens=48,
        expert_offload_num_resident=6,
        expert_offload_warmup_tokens=16,
        expert_offload_adapt="continuous",
    )
    assert on.offload["moves"] > 0
    assert on.offload["fault"] is None
    assert_same_answers(on, off)


def test_offloading_is_off_without_its_flags(checkpoints: Checkpoints, engines: Engines) -> None:
    off = engines.baseline(checkpoints("glm4_moe"))
    assert off.offload == {}

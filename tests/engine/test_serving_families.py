"""Greedy answers with experts offloaded are SGLang's own, token by token, for every supported architecture."""

from __future__ import annotations

import pytest
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded, assert_same_answers, assert_streamed

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


# Every family with all steps streamed and with none, and one of them with every share and with one buffer.
CASES = [("glm4_moe", "top_k", 0), *((family, "half", tokens) for family in FAMILIES for tokens in (0, "inf"))]
CASES += [("glm4_moe", "none", 0), ("glm4_moe", "all", 0)]


@pytest.mark.parametrize(("family", "share", "tokens"), CASES)
def test_offloaded_experts_give_the_same_tokens_and_logprobs(
    family: str, share: str, tokens: int | str, checkpoints: Checkpoints, engines: Engines
) -> None:
    experts, top_k, needed = FAMILIES[family]
    resident = {"none": 0, "top_k": top_k, "half": experts // 2, "all": experts}[share]
    checkpoint = checkpoints(family)
    off = engines.baseline(checkpoint, **needed)
    # Warm-up ends within the first request: the others are answered after experts have moved.
    on = engines.run(
        checkpoint,
        expert_offload_num_resident=resident,
        expert_offload_warmup_tokens=16,
        expert_offload_stream_tokens=tokens,
        **needed,
    )
    assert_offloaded(on.server_info, everything_resident=resident == experts)
    assert on.offload["warmup_done"]
    assert (on.offload["moves"] > 0) == (0 < resident < experts)
    assert_streamed(on, some=tokens == 0 and resident < experts)
    assert (on.offload["zero_copy_bytes"] > 0) == (tokens != 0 and resident < experts)
    assert_same_answers(on, off)


def test_with_one_stream_buffer_long_steps_stream_and_short_ones_read_in_place(
    checkpoints: Checkpoints, engines: Engines
) -> None:
    checkpoint = checkpoints("glm4_moe")
    off = engines.baseline(checkpoint)
    flags = {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": 8}
    two = engines.run(checkpoint, **flags)
    one = engines.run(checkpoint, **flags, expert_offload_stream_buffer_gb=two.offload["streaming"]["nbytes"] * 0.75 / 2**30)
    assert (two.offload["streaming"]["buffers"], one.offload["streaming"]["buffers"]) == (2, 1)
    for on in (one, two):
        assert_streamed(on)
        assert on.offload["zero_copy_bytes"] > 0
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

"""Greedy answers with experts offloaded are SGLang's own, token by token, for every supported architecture."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded, assert_same_answers, assert_streamed

# The architecture, experts and experts a token, as scripts/make_checkpoint.py has them; and what SGLang asks for beside the
# usual flags.
FAMILIES = {
    "glm4_moe": ("Glm4MoeForCausalLM", 16, 4, {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", 16, 4, {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", 16, 4, {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", 16, 4, {}),
    "mixtral": ("MixtralForCausalLM", 8, 2, {}),
    "olmoe": ("OlmoeForCausalLM", 16, 4, {}),
    "dots1": ("SGLang's Transformers fallback", 16, 4, {}),
    "gpt_oss": ("GptOssForCausalLM", 8, 2, {"attention_backend": "triton", "moe_runner_backend": "triton"}),
}
SINCE = {"gpt_oss": [pytest.mark.since("0.5.22", "it asks Triton for a GPU when it loads gpt-oss")]}
SHORT = 8
"""Steps of fewer tokens read in place: all that decode. Prompts stream."""


def case(family: str, share: str, tokens: int | str, *marks: pytest.MarkDecorator) -> Any:
    served = pytest.mark.works("Architecture", FAMILIES[family][0])
    return pytest.param(family, share, tokens, marks=[served, *SINCE.get(family, []), *marks], id=f"{family}-{share}-{tokens}")


USUAL = ("glm4_moe", "deepseek_v3", "gpt_oss")
"""Those that differ most: shared experts, latent attention, biases. Other files serve Qwen3-MoE and the fallback."""
# Families as they are used, each night all of them, with all steps streamed and with none too; and one with every share.
CASES = [
    *(case(family, "half", SHORT, *(() if family in USUAL else [pytest.mark.nightly])) for family in FAMILIES),
    *(case(family, "half", tokens, pytest.mark.nightly) for family in FAMILIES for tokens in (0, "inf")),
    case("glm4_moe", "top_k", 0, pytest.mark.nightly),
    case("glm4_moe", "none", 0),
    case("glm4_moe", "all", 0),
]


@pytest.mark.parametrize(("family", "share", "tokens"), CASES)
def test_offloaded_experts_give_the_same_tokens_and_logprobs(
    family: str, share: str, tokens: int | str, checkpoints: Checkpoints, engines: Engines
) -> None:
    _, experts, top_k, needed = FAMILIES[family]
    resident = {"none": 0, "top_k": top_k, "half": experts // 2, "all": experts}[share]
    checkpoint = checkpoints(family)
    off = engines.baseline(checkpoint, **needed)
    assert off.offload == {}
    # Warm-up ends within the first request: the others are answered after experts have moved.
    on = engines.baseline(
        checkpoint,
        expert_offload_num_resident=resident,
        expert_offload_warmup_tokens=16,
        expert_offload_stream_tokens=tokens,
        **needed,
    )
    assert_offloaded(on.server_info, everything_resident=resident == experts)
    assert on.offload["warmup_done"]
    assert (on.offload["moves"] > 0) == (0 < resident < experts)
    assert_streamed(on, some=tokens != "inf" and resident < experts)
    assert (on.offload["zero_copy_bytes"] > 0) == (tokens != 0 and resident < experts)
    assert_same_answers(on, off)


@pytest.mark.nightly
def test_with_one_stream_buffer_long_steps_stream_and_short_ones_read_in_place(
    checkpoints: Checkpoints, engines: Engines
) -> None:
    checkpoint = checkpoints("glm4_moe")
    off = engines.baseline(checkpoint)
    flags = {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": 8}
    two = engines.baseline(checkpoint, **flags)  # glm4_moe-half-8, as above
    one = engines.run(checkpoint, **flags, expert_offload_stream_buffer_gb=two.offload["streaming"]["nbytes"] * 0.75 / 2**30)
    assert (two.offload["streaming"]["buffers"], one.offload["streaming"]["buffers"]) == (2, 1)
    for on in (one, two):
        assert_streamed(on)
        assert on.offload["zero_copy_bytes"] > 0
        assert_same_answers(on, off)


@pytest.mark.nightly
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

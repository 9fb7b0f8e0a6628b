"""NEXTN speculation: drafts are checked by an offloaded model, and its answers stay the same."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, assert_offloaded, assert_same_answers, assert_streamed

# Under Triton's interpreter, which is exact in float32 only.
COMMON: dict[str, Any] = {
    "prompts": PROMPTS[:1],
    "max_new_tokens": 12,
    "env": {"TRITON_INTERPRET": "1"},
    "dtype": "float32",
    "attention_backend": "triton",
}
NEXTN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}


@pytest.mark.nightly
@pytest.mark.works("Speculation", "a draft model of its own (STANDALONE)")
def test_a_draft_model_of_its_own_gives_the_same_tokens(checkpoints: Checkpoints, engines: Engines) -> None:
    """Another MoE model, whose experts all stay in VRAM."""
    checkpoint, draft = checkpoints("qwen3_moe", dtype="float32"), checkpoints("olmoe", dtype="float32")
    drafting = {**NEXTN, "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    plain = engines.baseline(checkpoint, **COMMON)
    off = engines.baseline(checkpoint, **COMMON, **drafting)
    flags = {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": "inf"}
    on = engines.run(checkpoint, **COMMON, **drafting, **flags)
    assert_offloaded(on.server_info)
    assert_same_answers(on, off)
    assert on.answers[0].output_ids == plain.answers[0].output_ids
    assert on.answers[0].meta["spec_verify_ct"] > 0


@pytest.mark.works("Speculation", "NEXTN (MTP layers)")
def test_speculating_with_offloaded_experts_gives_the_same_tokens(checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("glm4_moe", dtype="float32")
    plain = engines.baseline(checkpoint, **COMMON)
    off = engines.baseline(checkpoint, **COMMON, **NEXTN)
    flags = {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": 2}
    on = engines.run(checkpoint, **COMMON, **NEXTN, **flags)
    assert_offloaded(on.server_info)
    assert_streamed(on)  # the prompt, and the steps that check drafts
    assert_same_answers(on, off)
    assert on.answers[0].output_ids == plain.answers[0].output_ids
    # It did speculate: some drafts were accepted, so that there were fewer steps than tokens.
    assert 0 < on.answers[0].meta["spec_verify_ct"] < len(on.answers[0].output_ids) - 1

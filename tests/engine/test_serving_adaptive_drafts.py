"""SGLang changes the number of drafts while it serves, with offloaded experts: the tokens and the changes are those without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, assert_offloaded, assert_same_answers

# Under Triton's interpreter, which is exact in float32 only.
pytestmark = [pytest.mark.since("0.5.23", "it has no kernel for drafts without a GPU"), pytest.mark.nightly]
COMMON: dict[str, Any] = {
    "prompts": PROMPTS[:1],
    "max_new_tokens": 24,
    "env": {"TRITON_INTERPRET": "1"},
    "dtype": "float32",
    "attention_backend": "triton",
}
OFFLOAD: dict[str, Any] = {
    "expert_offload_num_resident": 8,
    "expert_offload_draft_num_resident": 5,
    "expert_offload_warmup_tokens": 16,
    "expert_offload_stream_tokens": "inf",
}
AT_ONCE = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
"""A change after each step that calls for one."""


def adaptive(folder: Path, steps: list[int]) -> dict[str, Any]:
    """The arguments for drafts of these numbers."""
    (folder / "tiers.json").write_text(json.dumps({"1": {"candidate_steps": steps, **AT_ONCE}}))
    return {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
        "speculative_adaptive": True,
        "speculative_adaptive_config": str(folder / "tiers.json"),
        "log_level": "info",
    }


def changes_in(log: str) -> list[str]:
    return re.findall(r"Switch adaptive runtime state: steps (\d -> \d)", log)


@pytest.mark.parametrize("steps", [[1, 2], [0, 2]])
def test_the_number_of_drafts_changes_as_without_offloading(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path, steps: list[int]
) -> None:
    """And the tokens are those of a server that does not speculate."""
    drafting = adaptive(tmp_path, steps)
    checkpoint = checkpoints("glm4_moe", dtype="float32")
    off = engines.run(checkpoint, **COMMON, **drafting)
    on = engines.run(checkpoint, **COMMON, **drafting, **OFFLOAD)
    assert_offloaded(on.server_info)
    assert_same_answers(on, off)
    without, changes = changes_in(off.log), changes_in(on.log)
    assert without, "nothing changed"
    assert changes == without
    assert on.answers[0].output_ids == engines.baseline(checkpoint, **COMMON).answers[0].output_ids
    assert on.offload["fault"] is None
    assert on.offload["draft_zero_copy_bytes"] > 0

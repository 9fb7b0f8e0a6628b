"""After warm-up, the experts that the model really uses are the resident ones."""

from __future__ import annotations

import pytest
from checkpoints import HOT, Checkpoints
from serving import Engines

FAMILIES = ["glm4_moe", *(pytest.param(family, marks=pytest.mark.nightly) for family in ("qwen3_moe", "deepseek_v2"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hot_experts_of_each_layer_end_up_resident(family: str, checkpoints: Checkpoints, engines: Engines) -> None:
    result = engines.run(
        checkpoints(family, hot=HOT),
        record_experts=True,
        expert_offload_num_resident=len(HOT[0]),
        expert_offload_warmup_tokens=64,
    )
    assert result.expert_counts is not None
    counts_by_sglang = {layer: counts for layer, counts in enumerate(result.expert_counts) if sum(counts)}
    most_used = [sorted(sorted(range(16), key=lambda e: -counts[e])[:6]) for counts in counts_by_sglang.values()]
    assert most_used == [HOT[layer] for layer in counts_by_sglang], "the checkpoint is not skewed as it should be"
    assert result.offload["warmup_done"]
    assert [sorted(ids) for ids in result.offload["resident_ids"]] == most_used


def test_first_n_stays_as_it_is_whatever_is_used(checkpoints: Checkpoints, engines: Engines) -> None:
    result = engines.run(
        checkpoints("qwen3_moe", hot=HOT),
        expert_offload_num_resident=6,
        expert_offload_resident_selection="first_n",
    )
    assert result.offload["resident_ids"] == [[0, 1, 2, 3, 4, 5]] * 3
    assert result.offload["moves"] == 0

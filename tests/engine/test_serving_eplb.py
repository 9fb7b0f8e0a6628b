"""Two ranks among which SGLang rearranges the experts while they serve (EPLB): offloading goes along with it.

In float32. Which rank adds up which expert differs after each rearrangement, so answers without EPLB are close, not equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, TWO_RANKS, Engines, assert_offloaded, assert_same_answers, assert_streamed

from sglang_uvm_offload.routing.profile import Profile

EXPERTS, REDUNDANT, LAYERS, TOP_K = 16, 2, 3, 4
COMMON: dict[str, Any] = {
    "prompts": PROMPTS[:2],
    "max_new_tokens": 12,
    "dtype": "float32",
    "env": TWO_RANKS,
    "tp_size": 2,
    "ep_size": 2,
    "log_level": "info",
}
EPLB: dict[str, Any] = {
    "enable_eplb": True,
    "ep_num_redundant_experts": REDUNDANT,
    "eplb_rebalance_num_iterations": 4,
    "expert_distribution_recorder_buffer_size": 4,
}
FLAGS: dict[str, dict[str, Any]] = {
    "continuous": {"expert_offload_adapt": "continuous", "expert_offload_warmup_tokens": 8},
    "once": {"expert_offload_warmup_tokens": 8},
    "chunks": {"expert_offload_warmup_tokens": 8, "eplb_rebalance_layers_per_chunk": 1},
    "first_n": {"expert_offload_resident_selection": "first_n"},
    "slots": {"expert_offload_slots": 4, "expert_offload_warmup_tokens": 8},
}


@pytest.mark.parametrize(
    "flags", [name if name == "continuous" else pytest.param(name, marks=pytest.mark.nightly) for name in FLAGS]
)
def test_rearranged_experts_are_served_as_without_offloading(
    flags: str, checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    checkpoint, path = checkpoints("qwen3_moe", dtype="float32"), tmp_path / "p.npz"
    on = engines.run(
        checkpoint,
        **COMMON,
        **EPLB,
        **FLAGS[flags],
        expert_offload_num_resident=EXPERTS // 2,
        expert_offload_stream_tokens=6,
        expert_offload_save_profile=str(path),
    )
    assert on.log.count("[EPLBManager] rebalance end") >= 2 * 2, "each rank, more than once"
    assert_offloaded(on.server_info)
    assert_streamed(on)
    assert on.offload["fault"] is None
    assert on.offload["num_experts"] == LAYERS * (EXPERTS + REDUNDANT) // 2
    assert (on.offload["moved_bytes"] > 0) == (flags != "first_n")
    print(on.offload, Profile.load(path).seen.counts[:, :, 0].sum(axis=(0, 1)), Profile.load(path).ranks)
    assert_same_answers(on, engines.baseline(checkpoint, **COMMON, **EPLB))
    assert_same_answers(on, engines.baseline(checkpoint, **COMMON), 1e-5)

"""Speculation: drafts are checked by an offloaded model, some are drafted by one, and answers stay the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders.drafts import eagle, eagle3
from builders.plugins import saboteur
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, Result, assert_offloaded, assert_same_answers, assert_streamed

from scripts.harness.server import offload_state

# Under Triton's interpreter, which is exact in float32 only.
pytestmark = pytest.mark.since("0.5.23", "it has no kernel for drafts without a GPU")
INTERPRETED = {"TRITON_INTERPRET": "1"}
EXACT = {"dtype": "float32", "attention_backend": "triton"}
COMMON: dict[str, Any] = {"prompts": PROMPTS[:1], "max_new_tokens": 12, "env": INTERPRETED, **EXACT}
NEXTN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
IN_PLACE = {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 16, "expert_offload_stream_tokens": "inf"}
# Without a GPU, SGLang's library lacks what drafts of n-grams need. Here SGLang takes its own kernels for Intel's, interpreted.
TREES = """import types
sys.modules['sgl_kernel'] = types.ModuleType('sgl_kernel')
there = sys.modules['sgl_kernel.speculative'] = types.ModuleType('sgl_kernel.speculative')
there.reconstruct_indices_from_tree_mask = None
from sglang.kernels.ops.speculative import cache_locs, reconstruct_tree
del sys.modules['sgl_kernel'], sys.modules['sgl_kernel.speculative']
reconstruct_tree._is_xpu = cache_locs._is_xpu = True
"""


def drafts_from(algorithm: str, draft: Path) -> dict[str, Any]:
    return {**NEXTN, "speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft)}


def assert_some_drafts_accepted(answer: dict[str, Any]) -> None:
    """There were fewer steps than tokens."""
    assert 0 < answer["meta_info"]["spec_verify_ct"] < len(answer["output_ids"]) - 1


def same(engines: Engines, checkpoint: Path, drafting: dict[str, Any], flags: dict[str, Any], accepts: bool = True) -> Result:
    """What a server answers that drafts and offloads, once it is what one says that only drafts, and one that does neither."""
    plain = engines.baseline(checkpoint, **COMMON)
    off = engines.baseline(checkpoint, **COMMON, **drafting)
    on = engines.run(checkpoint, **COMMON, **drafting, **flags)
    assert_offloaded(on.server_info)
    assert_same_answers(on, off)
    assert on.answers[0].output_ids == plain.answers[0].output_ids
    if accepts:
        assert_some_drafts_accepted({"meta_info": on.answers[0].meta, "output_ids": on.answers[0].output_ids})
    assert on.answers[0].meta["spec_verify_ct"] > 0
    return on


@pytest.mark.nightly
@pytest.mark.works("Speculation", "a draft model of its own (STANDALONE)")
def test_a_draft_model_of_its_own_gives_the_same_tokens(checkpoints: Checkpoints, engines: Engines) -> None:
    """Another MoE model, whose experts all stay in VRAM."""
    checkpoint, draft = checkpoints("qwen3_moe", dtype="float32"), checkpoints("olmoe", dtype="float32")
    on = same(engines, checkpoint, drafts_from("STANDALONE", draft), IN_PLACE, accepts=False)
    assert on.offload["draft_offloaded_bytes"] == 0
    assert on.offload["draft_bytes"] > 0


@pytest.mark.nightly
@pytest.mark.works("Speculation", "NEXTN (MTP layers)")
def test_speculating_with_offloaded_experts_gives_the_same_tokens(checkpoints: Checkpoints, engines: Engines) -> None:
    flags = {**IN_PLACE, "expert_offload_stream_tokens": 2}
    on = same(engines, checkpoints("glm4_moe", dtype="float32"), NEXTN, flags)
    assert_streamed(on)  # the prompt, and the steps that check drafts


@pytest.mark.works("Speculation", "experts of draft layers (draft_num_resident)")
def test_draft_layers_with_offloaded_experts_draft_the_same(checkpoints: Checkpoints, engines: Engines) -> None:
    """As many drafts are accepted. After the warm-up, more of them are served from VRAM than by the first experts."""
    checkpoint = checkpoints("glm4_moe", dtype="float32")
    flags = {**IN_PLACE, "expert_offload_stream_tokens": 2, "expert_offload_draft_num_resident": 5, "log_level": "info"}
    on = same(engines, checkpoint, NEXTN, flags)
    assert_streamed(on)  # the prompt, and the steps that check drafts
    off = engines.baseline(checkpoint, **COMMON, **NEXTN)
    assert on.answers[0].meta["spec_verify_ct"] == off.answers[0].meta["spec_verify_ct"]
    state = on.offload
    assert state["draft_offloaded_bytes"] * 5 == state["draft_bytes"] * 11
    assert state["draft_zero_copy_bytes"] > 0
    told = r"residents of the draft model chosen from \d+ of its steps: hit rate of these ([\d.]+) % before, ([\d.]+) % after"
    chosen = re.search(told, on.log)
    assert chosen is not None
    before, after = map(float, chosen.groups())
    assert before < after
    assert state["draft_hit_rate"] > before / 100


def changes_in(result: Result) -> list[str]:
    return re.findall(r"Switch adaptive runtime state: steps (\d -> \d)", result.log)


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [[1, 2], [0, 2]])
def test_the_number_of_drafts_changes_as_without_offloading(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path, steps: list[int]
) -> None:
    """After each step that calls for a change. The tokens are those of a server that does not speculate."""
    at_once = {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0}
    (tmp_path / "tiers.json").write_text(json.dumps({"1": {"candidate_steps": steps, **at_once}}))
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": str(tmp_path / "tiers.json")}
    common: dict[str, Any] = {**COMMON, "max_new_tokens": 24, "log_level": "info"}
    checkpoint = checkpoints("glm4_moe", dtype="float32")
    off = engines.run(checkpoint, **common, **NEXTN, **adaptive)
    on = engines.run(checkpoint, **common, **NEXTN, **adaptive, **IN_PLACE, expert_offload_draft_num_resident=5)
    assert_offloaded(on.server_info)
    assert_same_answers(on, off)
    assert changes_in(on) == changes_in(off) != []
    assert on.answers[0].output_ids == engines.baseline(checkpoint, **common).answers[0].output_ids
    assert on.offload["fault"] is None
    assert on.offload["draft_zero_copy_bytes"] > 0


@pytest.mark.nightly
@pytest.mark.works("Speculation", "experts of a draft model of its own (draft_num_resident)")
def test_a_draft_model_of_its_own_is_offloaded(checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint, draft = checkpoints("qwen3_moe", dtype="float32"), checkpoints("olmoe", dtype="float32")
    flags = {**IN_PLACE, "expert_offload_draft_num_resident": 0}
    on = same(engines, checkpoint, drafts_from("STANDALONE", draft), flags, accepts=False)
    assert on.offload["draft_bytes"] == 0
    assert on.offload["draft_hit_rate"] == 0


@pytest.mark.nightly
@pytest.mark.works("Speculation", "EAGLE")
def test_a_draft_of_eagle_gives_the_same_tokens(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    same(engines, checkpoints("qwen3_moe", dtype="float32"), drafts_from("EAGLE", eagle(tmp_path / "draft")), IN_PLACE)


@pytest.mark.nightly
@pytest.mark.works("Speculation", "EAGLE3")
def test_a_draft_of_eagle_3_gives_the_same_tokens(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    same(engines, checkpoint, drafts_from("EAGLE3", eagle3(tmp_path / "draft", checkpoint)), IN_PLACE)


@pytest.mark.nightly
@pytest.mark.works("Speculation", "NGRAM")
def test_drafts_of_n_grams_give_the_same_tokens(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    checkpoint = checkpoints("qwen3_moe", dtype="float32")
    env = {**saboteur(tmp_path, TREES), **INTERPRETED}
    drafting = {**EXACT, "speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    request = {"text": PROMPTS[0], "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}}
    answers = []
    for flags in ({}, IN_PLACE):
        with engines.server(checkpoint, env=env, **drafting, **flags) as server:
            answers += [server.post("/generate", request) for _ in range(2)]  # drafted from the first
            info = server.get("/server_info")
    assert offload_state(info)["offloaded_bytes"] > 0
    assert all(answer["output_ids"] == answers[0]["output_ids"] for answer in answers)
    assert answers[0]["output_ids"] == engines.baseline(checkpoint, **COMMON).answers[0].output_ids
    assert_some_drafts_accepted(answers[-1])

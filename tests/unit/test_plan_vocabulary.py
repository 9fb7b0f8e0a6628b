"""How many ranks share an embedding and a head, as the plan counts them and as SGLang's model files say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import pytest
from builders.true_shape import config_folder

from sglang_uvm_offload.plan.architectures import model_files
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import preset
from sglang_uvm_offload.plan.vocabulary import WHOLE, WHOLE_IN_GROUPS

DEEPSEEK = "deepseek-ai/DeepSeek-V3"
GROUPS = Parallel(tp=8, dp=2, dp_attention=True)
OWN_HEADS = Parallel(tp=8, dp=2, dp_attention=True, dp_lm_head=True)


def case(model: str, parallel: Parallel) -> Case:
    """DeepSeek-V3's sizes, in the architecture that the model's configuration names."""
    named = tuple(json.loads((config_folder(model) / "config.json").read_text())["architectures"])
    shape = dataclasses.replace(shape_of(config_folder(DEEPSEEK) / "config.json"), architectures=named)
    return Case(shape, preset("8xH20"), Workload(4096), parallel, Reserve(), Assumptions())


@pytest.mark.parametrize(
    ("model", "parallel", "ranks"),
    [
        (DEEPSEEK, Parallel(tp=8), 8),
        (DEEPSEEK, GROUPS, 4),
        ("Qwen/Qwen3.5-397B-A17B", Parallel(tp=8), 8),
        ("Qwen/Qwen3.5-397B-A17B", GROUPS, 1),
        ("google/gemma-4-26B-A4B", Parallel(tp=8), 1),
    ],
)
def test_a_rank_holds_its_share_of_the_embedding(model, parallel, ranks):
    found = case(model, parallel)
    assert found.embedding_bytes == -(-found.model.embedding // ranks)


def test_all_ranks_share_the_head_unless_each_group_has_its_own():
    shared, own = (case(DEEPSEEK, parallel) for parallel in (GROUPS, OWN_HEADS))
    head = shared.model.head
    assert own.plain_bytes[0] - shared.plain_bytes[0] == -(-head // 4) - -(-head // 8)
    assert own.costs[0].draft_bytes - shared.costs[0].draft_bytes == -(-head // 4) - -(-head // 8)


@pytest.mark.sglang
def test_sglangs_files_share_embeddings_so():
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations
    text = {file.stem: file.read_text() for file in Path(package, "srt", "models").glob("*.py")}
    by_file = model_files()
    drafts = re.compile("NextN|DSpark|Assistant")
    in_groups = {name for name, file in by_file.items() if "enable_tp=not is_dp_attention_enabled()" in text[file]}
    assert {name for name in in_groups if not drafts.search(name)} == WHOLE_IN_GROUPS
    assert "class Gemma3TextScaledWordEmbedding(nn.Embedding)" in text["gemma3_causal"]
    assert "Gemma4TextScaledWordEmbedding = Gemma3TextScaledWordEmbedding" in text["gemma4_causal"]
    of_gemma = {name for name, file in by_file.items() if re.search(r"self\.(language_)?model = Gemma4TextModel\(", text[file])}
    assert {name for name in of_gemma if not drafts.search(name)} == WHOLE
    for file in ("deepseek_v2", "qwen3_moe", "glm4_moe", "gpt_oss"):
        assert "use_attn_tp_group=get_parallel().enable_dp_lm_head" in text[file]

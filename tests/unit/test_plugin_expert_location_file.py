"""Which models SGLang can serve with ``--init-expert-location`` at all."""

from __future__ import annotations

import json

import pytest
from builders.launch import launch
from builders.true_shape import config_folder

from sglang_uvm_offload.plugin.checks import expert_location_file

pytestmark = pytest.mark.sglang


def problems(model: str, layers: int, experts: int) -> list[str]:
    order = {expert_location_file.MAP: [list(range(experts))[::-1]] * layers}
    return expert_location_file.problems(*launch(model_path=str(config_folder(model)), init_expert_location=json.dumps(order)))


def test_a_model_whose_experts_are_placed_by_the_map_is_served():
    assert problems("Qwen/Qwen3-30B-A3B", 48, 128) == []


@pytest.mark.parametrize("model", ["openai/gpt-oss-20b", "openai/gpt-oss-120b"])
def test_a_model_that_would_answer_wrongly_is_refused(model):
    (problem,) = problems(model, 36, 128)
    assert "GptOssForCausalLM in the checkpoint's order, and answer wrongly; remove it" in problem


@pytest.mark.parametrize("model", ["mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x22B-v0.1"])
def test_a_model_without_a_place_for_the_map_is_refused(model):
    (problem,) = problems(model, 56, 8)
    assert problem.startswith("--init-expert-location ")
    assert "MixtralForCausalLM by a map, and would end at the first token; remove it" in problem


def test_without_a_map_every_model_is_served():
    cfg, model = launch(model_path=str(config_folder("mistralai/Mixtral-8x7B-v0.1")))
    assert expert_location_file.problems(cfg, model) == []

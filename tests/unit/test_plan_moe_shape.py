"""How many experts and draft layers a config states, by the names that model families give them."""

import pytest
from transformers import PretrainedConfig

from sglang_uvm_offload.plan.moe_shape import stated_drafts, stated_experts, stated_top_k


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 16}, 16),
        ({"n_routed_experts": 4, "num_experts": 16}, 16),
        ({"num_experts": [8, 16]}, 16),
        ({"num_experts": 0}, None),
        ({}, None),
    ],
)
def test_a_layer_has_no_more_experts_than_its_config_states_anywhere(config, experts):
    assert stated_experts(PretrainedConfig(**config)) == experts


@pytest.mark.parametrize(
    ("name", "family"),
    [("num_experts_per_tok", "most"), ("moe_k", "ERNIE 4.5"), ("top_k_experts", "Gemma 4"), ("moe_router_topk", "Zaya")],
)
def test_the_experts_of_a_token_are_read_by_the_familys_name(name, family):
    assert stated_top_k(PretrainedConfig(**{name: 6})) == 6, family


def test_a_list_of_top_k_gives_the_most_of_any_layer():
    assert stated_top_k(PretrainedConfig(moe_topk=[8, 8, 4])) == 8
    assert stated_top_k(PretrainedConfig(moe_topk="eight")) is None


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_nextn_predict_layers": 1}, 1),
        ({"mtp_num_hidden_layers": 2}, 2),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"model_type": "qwen3_next"}, 1),
        ({}, 0),
    ],
)
def test_draft_layers_are_those_that_the_config_states(config, layers):
    assert stated_drafts(PretrainedConfig.from_dict(config) if "model_type" not in config else type("C", (), config)) == layers

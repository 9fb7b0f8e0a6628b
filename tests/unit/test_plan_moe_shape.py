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
    ("config", "top_k"),
    [({"num_experts_per_tok": 6}, 6), ({"moe_router_topk": 6}, 6), ({"moe_topk": [8, 8, 4]}, 8), ({"moe_topk": "eight"}, None)],
)
def test_the_experts_of_a_token_are_the_most_of_any_layer_by_the_familys_name(config, top_k):
    assert stated_top_k(PretrainedConfig(**config)) == top_k


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

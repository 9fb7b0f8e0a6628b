"""Which layers route, by the rules that model families write into their configs."""

import pytest
from builders.true_shape import config_folder
from transformers import AutoConfig, PretrainedConfig

from sglang_uvm_offload.sizing.moe_shape import expert_size, moe_shape, stated_experts, stated_top_k


@pytest.mark.parametrize(
    ("config", "experts", "layers"),
    [
        ({"n_routed_experts": 160, "first_k_dense_replace": 1, "num_hidden_layers": 4}, 160, (1, 2, 3)),
        ({"n_routed_experts": 8, "moe_layer_freq": [0, 1, 1], "num_hidden_layers": 3}, 8, (1, 2)),
        ({"num_experts": 60, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}, 60, (1, 5)),
        ({"num_local_experts": 16, "moe_layers": [0, 3], "num_hidden_layers": 4}, 16, (0, 3)),
        ({"moe_num_experts": 48, "moe_layers_enum": "1,3", "num_hidden_layers": 4}, 48, (1, 3)),  # Step-3
        ({"num_experts": [64, 64, 64], "num_hidden_layers": 3}, 64, (0, 1, 2)),  # Hunyuan
        ({"moe_num_experts": [64, 32], "moe_layer_start_index": [1, 2], "num_hidden_layers": 4}, 64, (1, 2, 3)),  # ERNIE 4.5 VL
        (
            {"moe_num_experts": 64, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 2}
            | {"num_hidden_layers": 6},
            64,
            (1, 3),
        ),
        ({"moe_num_experts": 64, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "num_hidden_layers": 3}, 64, (1, 2)),
        ({"n_routed_experts": 128, "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4}, 128, (1, 3)),  # Nemotron-H
        ({"n_routed_experts": 8, "layers_block_type": ["mamba", "moe"], "num_hidden_layers": 2}, 8, (1,)),
        ({"num_local_experts": 8, "layers_block_type": ["mamba", "attention"], "num_hidden_layers": 2}, 8, (0, 1)),  # Granite
        ({"num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 4}, 16, (1, 3)),  # Jamba
        ({"num_experts": 32, "num_dense_layers": 2, "num_hidden_layers": 4}, 32, (2, 3)),  # LFM2
        ({"num_experts": 8, "mlp_layer_types": ["dense", "sparse"], "num_hidden_layers": 2}, 8, (1,)),
    ],
)
def test_moe_layers_follow_the_familys_rule(config, experts, layers):
    shape = moe_shape(PretrainedConfig(num_experts_per_tok=2, **config))
    assert (shape.num_experts, shape.top_k, shape.moe_layers) == (experts, 2, layers)


@pytest.mark.parametrize(
    ("model", "experts", "top_k", "layers"),
    [
        ("deepseek-ai/DeepSeek-V3", 256, 8, range(3, 61)),
        ("Qwen/Qwen3-30B-A3B", 128, 8, range(48)),
        ("mistralai/Mixtral-8x7B-v0.1", 8, 2, range(32)),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 128, 1, range(1, 48, 2)),
    ],
)
def test_a_published_model_is_read_by_its_own_class_of_configs(model, experts, top_k, layers):
    shape = moe_shape(AutoConfig.from_pretrained(config_folder(model)).get_text_config())
    assert (shape.num_experts, shape.top_k, shape.moe_layers) == (experts, top_k, tuple(layers))


@pytest.mark.parametrize("config", [{"num_hidden_layers": 4}, {"num_hidden_layers": 4, "num_experts": 0}])
def test_a_dense_model_has_no_shape(config):
    assert moe_shape(PretrainedConfig(**config)) is None


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


def test_a_list_of_expert_sizes_gives_the_largest():
    assert expert_size({"moe_intermediate_size": [3072, 1536], "intermediate_size": 8192}) == 3072
    assert expert_size({"intermediate_size": 14336}) == 14336
    assert expert_size({"expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288}) == 2048

"""The shape of a model's KV cache and states from SGLang's ``ModelConfig``, as its pools size them (``pool_configurator``)."""

from __future__ import annotations

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    ModelConfig,
    dsa_layer_skips_topk,
    get_dsa_index_head_dim,
    get_dsa_index_topk,
    is_deepseek_dsa,
)

from sglang_uvm_offload.plan.kv_cache import KvShape


def kv_of(config: ModelConfig, num_layers: int) -> KvShape:
    """``num_layers`` is the number of decoder layers."""
    latent = config.attention_arch == AttentionArch.MLA
    sparse = latent and is_deepseek_dsa(config.hf_config)
    heads, width = config.get_num_kv_heads(1), config.head_dim + config.v_head_dim
    windowed = config.is_hybrid_swa and config.swa_attention_layer_ids is not None
    window_heads, window_width = (
        (config.get_swa_num_kv_heads(1), config.swa_head_dim + config.swa_v_head_dim) if windowed else (heads, width)
    )
    own = (window_heads, window_width) != (heads, width)
    states = mambaish_config(config)
    params = states.mamba2_cache_params if states else None
    attending = frozenset(range(num_layers))
    if states:
        attending = frozenset(states.full_attention_layer_ids)
    elif windowed:
        attending = frozenset((*config.swa_attention_layer_ids, *(config.full_attention_layer_ids or ())))
    state_layers = frozenset(params.layers) if params else frozenset()
    return KvShape(
        heads=heads,
        head_dim=config.head_dim,
        value_dim=config.v_head_dim,
        latent=config.kv_lora_rank if latent else 0,
        rope=config.qk_rope_head_dim if latent else 0,
        index_dim=get_dsa_index_head_dim(config.hf_config) if sparse else 0,
        index_topk=get_dsa_index_topk(config.hf_config) if sparse else 0,
        shared_index_layers=frozenset(layer for layer in attending if sparse and dsa_layer_skips_topk(config.hf_config, layer)),
        window=(config.sliding_window_size or config.attention_chunk_size or 0) if windowed else 0,
        window_layers=frozenset(config.swa_attention_layer_ids) if windowed else frozenset(),
        window_heads=window_heads if own else 0,
        window_dim=window_width if own else 0,
        state_layers=state_layers - attending,
        empty_layers=frozenset(range(num_layers)) - attending - state_layers,
        layer_state_bytes=params.mamba_cache_per_req // max(1, len(state_layers)) if params else 0,
        attentions=max(1, config.num_attention_layers // num_layers),
    )

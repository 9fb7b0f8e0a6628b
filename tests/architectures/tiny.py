"""A config of each of SGLang's architectures, small enough to build on a CPU, and by one rule for all: that of transformers or
of SGLang, with the sizes in ``TINY`` wherever it states them. ``exceptions.json`` has what the rule cannot know."""

from __future__ import annotations

import inspect
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.models.registry import ModelRegistry
from sglang.srt.utils.hf_transformers.common import get_hf_text_config
from sglang.srt.utils.hf_transformers_utils import get_config
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

EXCEPTIONS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("exceptions.json").read_text())
"""By architecture, each with a reason: ``like``, the architecture or the type of config that it is built from; ``bare``, that
no class of configs is used; ``parts``, types of the configs inside it; ``layers``; and ``config``, values by path. For the
test that builds it: ``expert``, the weights of an expert; ``times``, how often it builds its layers; ``only``, what a config
must have for SGLang's layer; ``no_experts``; ``not_tried``, the error with which it is not built; and ``sglang_fails``, the
error with which SGLang cannot build it, whatever its config. For the launch of it, in a published file's place: ``stated_as``,
the names that a file has for parts; and ``launch``, values by path, null for one that no file has."""

EXPERTS = 8
LAYERS = 4
HIDDEN, EXPERT_SIZE, DENSE_SIZE = 256, 128, 512
"""So that an expert's slice of each projection is 64 KiB or more: one below stays in plain VRAM."""

TINY: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "experts_per_token"), 2),
    **dict.fromkeys(("top_k_experts", "num_selected_experts", "moe_router_topk"), 2),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "d_model", "text_hidden_size", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), EXPERT_SIZE),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"), DENSE_SIZE),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 64),
}
"""Sizes, by the names that configs have for them."""

USUAL: dict[str, Any] = {
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "layernorm_epsilon": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "norm_topk_prob": True,
    "embedding_dropout": 0.0,
    "use_qkv_bias": False,
    "use_bias": False,
    "use_qk_norm": False,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "encoder_only": False,
    "language_only": False,
    "route_norm": True,
    "in_chans": 3,
    "deepstack_visual_indexes": [],
    "rope_scaling": None,
    "full_attention_interval": 2,
    "layer_types": ["full_attention"] * LAYERS,
    "softmax_scale": None,
    "attn_module_list_cfg": [],
    "mlp_bias": False,
    "hc_eps": 1e-6,
    "block_size": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "n_groups": 1,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "embed_dim": 64,
    **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
    **dict.fromkeys(("swa_head_dim", "swa_v_head_dim"), 64),
    "swa_rope_theta": 10000.0,
    "yarn_only_types": [],
    "no_rope_layers": [],
    "encoder_config": None,
    "attention_value_scale": None,
    "dflash_config": {},
    "dim_model_base": 256,
    "mlp_ratio": 4.0,
    "use_mixed_mlp_moe": True,
    "use_cla": False,
    "force_image_size": 224,
    **dict.fromkeys(("select_layer", "vision_feature_layer"), -1),
    "template": "",
    "ps_version": "v2",
    "downsample_ratio": 0.5,
    "enable_sink_attention": False,
    "sliding_window_size": 128,
    "num_shared_expert": 1,
    "moe_layer_start_index": 1,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"), [0.0] * 8),
    "vt_hidden_size": 64,
    **dict.fromkeys(("dropout", "drop_path_rate"), 0.0),
    "first_layer_ffn_out_scale": None,
    **dict.fromkeys(("use_head_wise_attn_gate", "need_fp32_gate"), False),
    **dict.fromkeys(("attn_out_scale", "ffn_out_scale"), None),
    **dict.fromkeys(("initializer_factor", "logit_scale", "moe_router_scaling_factor"), 1.0),
    "use_moe_router_bias": False,
    "spatial_conv_size": 2,
    "temporal_conv_size": 2,
    "norm_type": "rms_norm",
    "pixel_hidden_size": 64,
    "partial_rotary_factors": [1.0] * 8,
    "qk_normalization": False,
    "first_layer_attn_out_scale": None,
    "num_attention_groups": 4,
}
"""What a model asks of its config where the class states nothing: that of a checkpoint with code of its own does not."""


def config_class(architecture: str) -> type[PretrainedConfig]:
    """Transformers' class for ``architecture``, else the one that SGLang's model names, else a bare one."""
    by_type = (name for name in dir(modeling_auto) if name.startswith("MODEL") and name.endswith("_MAPPING_NAMES"))
    for mapping in by_type:
        for model_type, named in getattr(modeling_auto, mapping).items():
            if architecture in ([named] if isinstance(named, str) else named):
                return CONFIG_MAPPING[model_type]
    for model in ModelRegistry.models[architecture].__mro__:
        if "__init__" in model.__dict__:
            config = _named_in(model)
            if config is not None:
                return config
            break
    return PretrainedConfig


def _named_in(model: type) -> type[PretrainedConfig] | None:
    """The class of configs that the annotation in ``model.__init__`` names."""
    parameter = inspect.signature(model.__init__).parameters.get("config")
    named = None if parameter is None else parameter.annotation
    if isinstance(named, str):
        named = vars(sys.modules[model.__module__]).get(named)
    return named if inspect.isclass(named) and issubclass(named, PretrainedConfig) and named is not PretrainedConfig else None


def tiny_config(architecture: str, experts: int) -> PretrainedConfig:
    """With ``experts`` routed experts a layer."""
    exception = EXCEPTIONS.get(architecture, {})
    like = exception.get("like", architecture)
    given = {**EXCEPTIONS.get(like, {}).get("config", {}), **exception.get("config", {})}
    if exception.get("bare"):
        made = PretrainedConfig(**TINY)
    elif like in CONFIG_MAPPING:
        made = CONFIG_MAPPING[like]()
    else:
        cls = config_class(like)
        made = cls() if cls is not PretrainedConfig else PretrainedConfig(**TINY)
    for path, model_type in exception.get("parts", {}).items():
        _set(made, path, CONFIG_MAPPING[model_type]())
    for config in _parts(made):
        _shrink(config, exception.get("layers", LAYERS))
    for path, value in given.items():
        _set(made, path, value)
    _set_experts(made, experts)
    made.architectures = [architecture]
    if not made.model_type:
        return made
    read = parsed(made)
    for path, value in given.items():  # what a config's class has made of them
        _set(read, path, value)
    _set_experts(read, experts)
    return read


def parsed(config: PretrainedConfig) -> PretrainedConfig:
    """As SGLang reads it from a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config.to_dict(), default=str))
        return get_config(folder, trust_remote_code=False)


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """As SGLang finds it."""
    return get_hf_text_config(config)


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """``config`` and what it holds but for encoders of images and sounds, of which fewer layers are enough."""
    yield config
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig) and ("vision" in name or "audio" in name):
            for count in ("num_hidden_layers", "depth", "encoder_layers"):
                if isinstance(vars(value).get(count), int):
                    setattr(value, count, 1)
        elif isinstance(value, PretrainedConfig):
            yield from _parts(value)


def _shrink(config: PretrainedConfig, layers: int) -> None:
    stated = dict(vars(config))
    whole = stated.get("num_hidden_layers")
    for name, value in stated.items():
        if isinstance(value, (list, tuple)) and whole and len(value) == whole and name != "architectures":
            setattr(config, name, value[:layers])
        elif name in TINY and isinstance(value, int):
            setattr(config, name, TINY[name])
    if isinstance(whole, int):
        config.num_hidden_layers = layers


def _set_experts(config: PretrainedConfig, experts: int) -> None:
    for part in _parts(config):
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
            stated = vars(part).get(name)
            if stated:
                setattr(part, name, [experts] * len(stated) if isinstance(stated, list) else experts)


def _set(config: PretrainedConfig, path: str, value: Any) -> None:
    """Parts of a config that no class has read are dicts."""
    *parts, name = path.split(".")
    held: Any = config
    for part in parts:
        held = held[part] if isinstance(held, dict) else getattr(held, part)
    if isinstance(held, dict):
        held[name] = value
    else:
        setattr(held, name, value)

"""The part of a config.json that describes the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_THE_WHOLE = ("quantization_config", "compression_config", "torch_dtype", "dtype")
_ALIASES = {
    "num_hidden_layers": ("num_layers", "n_layers", "n_layer"),
    "hidden_size": ("d_model", "n_embd"),
    "num_attention_heads": ("n_heads", "n_head"),
    "num_key_value_heads": ("num_attention_groups",),
    "max_position_embeddings": ("max_seq_len", "max_sequence_length", "seq_length", "model_max_length"),
}
"""Other names of what every model has, as SGLang's config classes map them."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of config.json for the language model (SGLang's ``get_hf_text_config``), by the usual names; a quantisation or
    dtype next to it applies to it."""
    outer = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    for name in ("thinker_config", "llm_config", "language_config", "text_config"):
        if isinstance(inner := config.get(name), dict):
            return text_config(outer | {key: value for key, value in inner.items() if value is not None or key not in outer})
    aliases = {
        usual: config[name]
        for usual, names in _ALIASES.items()
        if config.get(usual) is None
        for name in names
        if name in config
    }
    return {**config, **aliases}

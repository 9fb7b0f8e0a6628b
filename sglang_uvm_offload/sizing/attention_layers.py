"""What each decoder layer keeps of a request, by the names that model families write into their configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from sglang_uvm_offload.sizing.safetensors_header import CheckpointError

Kept = Literal["all", "window", "state", "nothing"]
"""Keys and values of all tokens, or of the last ones; a state of fixed size; or nothing, in a layer that is only an MLP."""

_WINDOW = ("sliding", "chunked", "local")
_STATE = ("linear", "mamba", "conv", "recurrent", "kda", "lightning")
_NOTHING = ("mlp", "moe", "dense", "sparse")
_LETTERS: Mapping[str, Kept] = {"*": "all", "M": "state", "-": "nothing", "E": "nothing"}
"""Of Nemotron-H's ``hybrid_override_pattern``."""

LLAMA4_FULL_EVERY = 4
"""Llama 4 attends to all tokens in one of four layers (SGLang 0.5.23, ``get_hybrid_layer_ids``)."""


def kept(config: Mapping[str, Any], layers: int) -> list[Kept]:
    """One for each of ``layers``, of a text config. Raises ``CheckpointError`` for a list of another length."""
    found = next((kinds for kinds in _stated(config, layers) if kinds is not None), None)
    if found is None:
        return ["all"] * layers
    if len(found) != layers:
        raise CheckpointError("the config's layer_types does not name one type for each layer")
    return found


def _stated(config: Mapping[str, Any], layers: int) -> Iterator[list[Kept] | None]:
    """By each way in which a config may state it, None where it does not."""
    for name in ("layer_types", "layers_block_type"):
        if names := config.get(name):
            yield [_named(str(each)) for each in _listed(names, name)]
    if pattern := config.get("hybrid_override_pattern"):
        yield [_LETTERS.get(letter, "all") for letter in str(pattern)]
    if pattern := config.get("hybrid_layer_pattern"):  # MiMo-V2
        yield ["window" if each == 1 else "all" for each in _listed(pattern, "hybrid_layer_pattern")]
    if kinds := config.get("attn_type_list"):  # MiniMax-Text-01
        yield ["all" if each == 1 else "state" for each in _listed(kinds, "attn_type_list")]
    if isinstance(linear := config.get("linear_attn_config"), dict) and (kda := linear.get("kda_layers")):
        yield ["state" if layer + 1 in _listed(kda, "kda_layers") else "all" for layer in range(layers)]
    if every := _size(config.get("full_attention_interval")) or _size(config.get("layer_group_size")):
        yield ["all" if (layer + 1) % every == 0 else "state" for layer in range(layers)]
    if period := _size(config.get("attn_layer_period")):  # Jamba
        offset = config.get("attn_layer_offset") or 0
        yield ["all" if layer % period == offset else "state" for layer in range(layers)]
    if _size(config.get("attention_chunk_size")):
        yield ["all" if (layer + 1) % LLAMA4_FULL_EVERY == 0 else "window" for layer in range(layers)]


def _named(name: str) -> Kept:
    if any(word in name for word in _WINDOW):
        return "window"
    if any(word in name for word in _STATE):
        return "state"
    return "nothing" if name in _NOTHING else "all"


def _listed(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"the config's {name} is {value!r:.80}, not a list of layers")
    return value


def _size(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

"""Bytes of VRAM that the KV cache takes per token, as SGLang 0.5.23 sizes its pools (``pool_configurator``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.sizing.safetensors_header import CheckpointError

DTYPE_BYTES = {"bfloat16": 2, "bf16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""The supported values of ``--kv-cache-dtype``; ``auto`` is the model's own two-byte type."""

WINDOW_RATIO = 0.8
"""The default of ``--swa-full-tokens-ratio``: slots of a sliding-window layer for each slot of a full one."""

INDEX_BLOCK = 128
"""Index keys that share a scale of four bytes (``DSATokenToKVPool.quant_block_size``)."""


@dataclass(frozen=True)
class KvShape:
    """The KV cache of one token in an attention layer: keys and values of ``heads`` heads, or one latent vector for all
    (``latent`` + ``rope`` values, the same on every rank), and for sparse attention an index key of ``index_dim`` bytes."""

    heads: int
    head_dim: int
    value_dim: int
    latent: int = 0
    rope: int = 0
    index_dim: int = 0
    index_topk: int = 0
    """The number of tokens that sparse attention reads, selected by the index keys of all."""
    window_layers: frozenset[int] = frozenset()
    """Decoder layers that keep only ``window`` tokens of a request."""
    window: int = 0
    stateless_layers: frozenset[int] = frozenset()
    """Decoder layers with linear attention, which keep a state for each request and no keys (``linear_state``)."""

    def layer_bytes(self, attn_tp: int, itemsize: int) -> int:
        """Bytes for one token in one layer on one rank, if ``attn_tp`` ranks share the attention. Each rank holds at least one
        head."""
        if not self.latent:
            return -(-self.heads // attn_tp) * (self.head_dim + self.value_dim) * itemsize
        if self.index_dim and itemsize == 1:
            # Sparse attention over FP8: scales beside the latent, and the rotary part kept in two bytes.
            main = self.latent + self.latent // INDEX_BLOCK * 4 + self.rope * 2
        else:
            main = (self.latent + self.rope) * itemsize
        return main + self._index_bytes()

    def pool_bytes(self, layers: range, attn_tp: int, itemsize: int) -> float:
        """Bytes of the pools of ``layers`` on one rank, per token of capacity."""
        one = self.layer_bytes(attn_tp, itemsize)
        windowed = len(self.window_layers.intersection(layers))
        full = len(layers) - windowed - len(self.stateless_layers.intersection(layers))
        return one * (full + WINDOW_RATIO * windowed if full else windowed)

    def read_bytes(self, layers: range, attn_tp: int, itemsize: int, context: int) -> int:
        """Bytes of the KV cache that one decoded token at position ``context`` reads in ``layers`` on one rank."""
        one = self.layer_bytes(attn_tp, itemsize)
        windowed = len(self.window_layers.intersection(layers))
        full = len(layers) - windowed - len(self.stateless_layers.intersection(layers))
        if self.index_topk:
            index = self._index_bytes()
            return full * (index * context + (one - index) * min(context, self.index_topk))
        return one * (full * context + windowed * min(context, self.window))

    def _index_bytes(self) -> int:
        return self.index_dim + self.index_dim // INDEX_BLOCK * 4


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """The shape described by a text config."""
    sizes = {
        name: config.get(name) or 0
        for name in (
            *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers", "v_head_dim"),
            *("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_topk", "sliding_window"),
        )
    }
    wrong = [name for name, value in sizes.items() if not isinstance(value, int) or isinstance(value, bool) or value < 0]
    if wrong or not sizes["num_attention_heads"]:
        raise CheckpointError(f"the config's {wrong[0] if wrong else 'num_attention_heads'} is not a size")
    types = config.get("layer_types") or _every(config.get("full_attention_interval"), sizes["num_hidden_layers"])
    if not isinstance(types, list) or len(types) not in (0, sizes["num_hidden_layers"]):
        raise CheckpointError("the config's layer_types does not name one type for each layer")
    head_dim = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    return KvShape(
        heads=sizes["num_key_value_heads"] or sizes["num_attention_heads"],
        head_dim=head_dim,
        value_dim=head_dim if sizes["kv_lora_rank"] else sizes["v_head_dim"] or head_dim,
        latent=sizes["kv_lora_rank"],
        rope=sizes["qk_rope_head_dim"],
        index_dim=sizes["index_head_dim"],
        index_topk=sizes["index_topk"],
        window=sizes["sliding_window"],
        window_layers=frozenset(i for i, t in enumerate(types) if t == "sliding_attention" and sizes["sliding_window"]),
        stateless_layers=frozenset(i for i, t in enumerate(types) if t == "linear_attention"),
    )


def _every(interval: Any, layers: int) -> list[str]:
    """The types of Qwen3-Next's layers, of which every ``interval``-th has full attention."""
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        return []
    return ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]

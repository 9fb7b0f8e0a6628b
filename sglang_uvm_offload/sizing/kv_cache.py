"""Bytes of VRAM that the KV cache takes per token, as SGLang 0.5.23 sizes its pools (``pool_configurator``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.sizing.attention_layers import Kept, kept
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
    shared_index_layers: frozenset[int] = frozenset()
    """Decoder layers that read what the layer before selected, and have no index keys."""
    window_layers: frozenset[int] = frozenset()
    """Decoder layers that keep only ``window`` tokens of a request."""
    window: int = 0
    window_heads: int = 0
    window_dim: int = 0
    """Of these layers, where they differ: heads, and elements of a head's key and value together."""
    state_layers: frozenset[int] = frozenset()
    """Decoder layers with linear attention or Mamba, which keep a state for each request and no keys (``linear_state``)."""
    empty_layers: frozenset[int] = frozenset()
    """Decoder layers without attention, which keep nothing."""

    def layer_bytes(self, attn_tp: int, itemsize: int) -> int:
        """Bytes for one token in one layer on one rank, if ``attn_tp`` ranks share the attention. Each rank holds at least one
        head."""
        if not self.latent:
            return -(-self.heads // attn_tp) * (self.head_dim + self.value_dim) * itemsize
        if self.index_dim and itemsize == 1:
            # Sparse attention over FP8: scales next to the latent, and the rotary part kept in two bytes.
            main = self.latent + self.latent // INDEX_BLOCK * 4 + self.rope * 2
        else:
            main = (self.latent + self.rope) * itemsize
        return main + self._index_bytes()

    def window_bytes(self, attn_tp: int, itemsize: int) -> int:
        """The same in a layer with a window."""
        if not self.window_heads:
            return self.layer_bytes(attn_tp, itemsize)
        return -(-self.window_heads // attn_tp) * self.window_dim * itemsize

    def pool_bytes(self, layers: range, attn_tp: int, itemsize: int) -> float:
        """Bytes of the pools of ``layers`` on one rank, per token of capacity."""
        windowed, full = len(self.window_layers.intersection(layers)), self._full(layers)
        share = WINDOW_RATIO if full else 1
        return (
            full * self.layer_bytes(attn_tp, itemsize)
            + share * windowed * self.window_bytes(attn_tp, itemsize)
            - len(self.shared_index_layers.intersection(layers)) * self._index_bytes()
        )

    def read_bytes(self, layers: range, attn_tp: int, itemsize: int, context: int) -> int:
        """Bytes of the KV cache that one decoded token at position ``context`` reads in ``layers`` on one rank."""
        one, full = self.layer_bytes(attn_tp, itemsize), self._full(layers)
        windowed = len(self.window_layers.intersection(layers))
        if self.index_topk:
            index = self._index_bytes()
            indexed = full - len(self.shared_index_layers.intersection(layers))
            return indexed * index * context + full * (one - index) * min(context, self.index_topk)
        return one * full * context + windowed * self.window_bytes(attn_tp, itemsize) * min(context, self.window)

    def _full(self, layers: range) -> int:
        """How many of ``layers`` keep all tokens."""
        return len(set(layers) - self.window_layers - self.state_layers - self.empty_layers)

    def _index_bytes(self) -> int:
        return self.index_dim + self.index_dim // INDEX_BLOCK * 4


_SIZES = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "index_topk", "sliding_window", "attention_chunk_size"),
    *("global_head_dim", "num_global_key_value_heads"),
)


def kv_shape(config: Mapping[str, Any]) -> KvShape:
    """The shape described by a text config."""
    sizes = {name: config.get(name) or 0 for name in _SIZES}
    wrong = [name for name, value in sizes.items() if not isinstance(value, int) or isinstance(value, bool) or value < 0]
    if wrong or not sizes["num_attention_heads"]:
        raise CheckpointError(f"the config's {wrong[0] if wrong else 'num_attention_heads'} is not a size")
    layers = kept(config, sizes["num_hidden_layers"])
    window = sizes["sliding_window"] or sizes["attention_chunk_size"]
    head_dim = sizes["head_dim"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    heads = sizes["num_key_value_heads"] or sizes["num_attention_heads"]
    full_dim, full_heads = sizes["global_head_dim"] or head_dim, sizes["num_global_key_value_heads"] or heads
    own = (full_dim, full_heads) != (head_dim, heads)
    return KvShape(
        heads=full_heads,
        head_dim=full_dim,
        value_dim=full_dim if sizes["kv_lora_rank"] or own else sizes["v_head_dim"] or full_dim,
        latent=sizes["kv_lora_rank"],
        rope=sizes["qk_rope_head_dim"],
        index_dim=sizes["index_head_dim"],
        index_topk=sizes["index_topk"],
        shared_index_layers=_sharing(config, sizes["num_hidden_layers"]) if sizes["index_head_dim"] else frozenset(),
        window=window,
        window_layers=_those(layers, "window") if window else frozenset(),
        window_heads=heads if own else 0,
        window_dim=2 * head_dim if own else 0,
        state_layers=_those(layers, "state"),
        empty_layers=_those(layers, "nothing"),
    )


def _those(layers: list[Kept], kind: Kept) -> frozenset[int]:
    return frozenset(index for index, each in enumerate(layers) if each == kind)


def _sharing(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """The layers that have no index of their own (SGLang 0.5.23, ``dsa_layer_skips_topk``)."""
    if isinstance(types := config.get("indexer_types"), list):
        return frozenset(index for index, kind in enumerate(types[:layers]) if kind == "shared")
    if isinstance(pattern := config.get("index_topk_pattern"), str):
        return frozenset(index for index, letter in enumerate(pattern[:layers]) if letter == "S")
    every = config.get("index_topk_freq") or 1
    if not isinstance(every, int) or every < 1:
        raise CheckpointError(f"the config's index_topk_freq is {every!r}, not a number of layers")
    first = config.get("index_skip_topk_offset") or 2
    return frozenset(index for index in range(layers) if max(index - first + 1, 0) % every)

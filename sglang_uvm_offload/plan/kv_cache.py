"""Bytes of VRAM that the KV cache takes per token, as SGLang 0.5.23 sizes its pools (``pool_configurator``)."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes per value of a ``--kv-cache-dtype``. ``auto`` is the model's own two-byte type; SGLang may choose a smaller one."""
FP8 = "fp8_e4m3"
DTYPES = tuple(name for name in DTYPE_BYTES if name != "float16")
"""The values that SGLang's flag takes."""

WINDOW_RATIO = 0.8
"""The default of ``--swa-full-tokens-ratio``: capacity of a sliding-window layer relative to a full one."""

STATE_SHARE, STATES_OF_REQUEST = 0.9, 5
"""SGLang's default of ``--mamba-full-memory-ratio`` (memory of states relative to the KV cache), and its states per request:
three for the radix cache, and two in the extra buffer on GPUs (``_calculate_mamba_ratio``)."""

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
    """The number of tokens that sparse attention selects by index keys and reads."""
    shared_index_layers: frozenset[int] = frozenset()
    """Decoder layers without index keys, which reuse the previous layer's selection."""
    window_layers: frozenset[int] = frozenset()
    """Decoder layers that keep only ``window`` tokens of a request."""
    window: int = 0
    window_heads: int = 0
    window_dim: int = 0
    """Heads of the window layers, and elements of one head's key plus value, if they differ from the other layers'."""
    state_layers: frozenset[int] = frozenset()
    """Decoder layers with linear attention or Mamba, which keep one state per request and no keys."""
    empty_layers: frozenset[int] = frozenset()
    """Decoder layers without attention, which keep nothing."""
    layer_state_bytes: int = 0
    """Bytes of one request's state in one state layer, before ranks divide it."""
    attentions: int = 1
    """Caches per decoder layer; two for LongCat."""

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
        """Bytes for one token in a sliding-window layer on one rank."""
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

    def state_bytes(self, layers: range, attn_tp: int) -> int:
        """Bytes of one request's state in ``layers`` on one rank."""
        return len(self.state_layers.intersection(layers)) * -(-self.layer_state_bytes // attn_tp)

    def _full(self, layers: range) -> int:
        """The number of caches in ``layers`` that keep all tokens."""
        return self.attentions * len(set(layers) - self.window_layers - self.state_layers - self.empty_layers)

    def _index_bytes(self) -> int:
        return self.index_dim + self.index_dim // INDEX_BLOCK * 4

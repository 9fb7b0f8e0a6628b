"""Bytes of VRAM that the KV cache takes per token, as SGLang 0.5.23 sizes its pools (``pool_configurator``)."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"auto": 2, "bfloat16": 2, "bf16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes per value of a ``--kv-cache-dtype``. ``auto`` is the model's own two-byte type; SGLang may choose a smaller one."""
DTYPES = tuple(name for name in DTYPE_BYTES if name != "float16")
"""Those that SGLang's flag takes."""

WINDOW_RATIO = 0.8
"""The default of ``--swa-full-tokens-ratio``: slots of a sliding-window layer for each slot of a full one."""

STATE_SHARE, STATES_OF_REQUEST = 0.9, 5
"""SGLang's default of ``--mamba-full-memory-ratio``, memory of states by that of the KV cache, and how many states it keeps
of a request: three for its radix cache, and two in the extra buffer that it has on GPUs (``_calculate_mamba_ratio``)."""

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
    """Decoder layers with linear attention or Mamba, which keep a state for each request and no keys."""
    empty_layers: frozenset[int] = frozenset()
    """Decoder layers without attention, which keep nothing."""
    layer_state_bytes: int = 0
    """The state of one request in one of ``state_layers``, undivided."""
    attentions: int = 1
    """Caches of one decoder layer: LongCat's have two."""

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

    def state_bytes(self, layers: range, attn_tp: int) -> int:
        """Bytes of the state that ``layers`` keep of one request on one rank."""
        return len(self.state_layers.intersection(layers)) * -(-self.layer_state_bytes // attn_tp)

    def _full(self, layers: range) -> int:
        """How many caches of ``layers`` keep all tokens."""
        return self.attentions * len(set(layers) - self.window_layers - self.state_layers - self.empty_layers)

    def _index_bytes(self) -> int:
        return self.index_dim + self.index_dim // INDEX_BLOCK * 4

"""A draft model with a checkpoint of its own (``--speculative-draft-model-path``): what its headers say of its VRAM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

from sglang_uvm_offload.sizing.kv_cache import KvShape, kv_shape
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.moe_shape import stated_experts
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo
from sglang_uvm_offload.sizing.tensor_names import divisions, named_for_experts
from sglang_uvm_offload.sizing.text_config import text_config


@dataclass(frozen=True)
class DraftModel:
    """Sizes are bytes of the checkpoint, by how ranks divide them. All of it counts as in VRAM, experts too."""

    layers: int
    """Layers that keep keys and values."""
    kv: KvShape
    attention: int
    """Divided by the ranks that share the attention, and so are the vocabulary's tensors."""
    feed_forward: int
    """With experts; divided by all tensor-parallel ranks."""
    whole: int

    def rank_bytes(self, tp: int, attn_tp: int) -> int:
        """The weights on one rank: an upper bound, because a draft may share the model's vocabulary."""
        return -(-self.attention // attn_tp) + -(-self.feed_forward // tp) + self.whole


def load_draft(files: ModelFiles) -> DraftModel:
    """Raises ``CheckpointError`` with the reason."""
    config = text_config(files.config())
    layers = config.get("num_nextn_predict_layers") or config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers < 4096:
        raise CheckpointError(f"{files.name}: the config's num_hidden_layers is {layers!r}, not a number of layers")
    sums = _sums(files.tensors())
    return DraftModel(layers, kv_shape(config), sums["attention"], sums["feed_forward"], sums["replicated"])


def draft_experts(files: ModelFiles) -> int | None:
    """The routed experts of a layer that the config states, None without any. Raises ``CheckpointError``."""
    return stated_experts(SimpleNamespace(**text_config(files.config())))


def _sums(tensors: Iterable[TensorInfo]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for tensor in tensors:
        # Heads of keys and values may be fewer than ranks, so they count as whole.
        kind = _division(tensor.name)
        sums["replicated" if kind == "keys_values" else kind] += tensor.nbytes
    return sums


def _division(name: str) -> str:
    if named_for_experts(name):
        return "feed_forward"
    if "embed_tokens" in name or "lm_head" in name:
        return "attention"
    return divisions(name)[0]

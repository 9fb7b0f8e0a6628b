"""A model's shape: bytes per layer, and which of them are routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.plan.kv_cache import KvShape
from sglang_uvm_offload.plan.lookup_tables import LookupTable


@dataclass(frozen=True)
class ExpertPart:
    """One tensor ``[experts, ...]`` of a layer as a server holds it: fused gate and up projections, or down."""

    name: str
    nbytes: int
    """Bytes of the largest expert before ranks divide it."""
    split: bool
    """Whether tensor parallelism divides it. An output bias or a single scale is whole on every rank."""


@dataclass(frozen=True)
class LayerShape:
    """Bytes of one decoder layer, grouped by how ranks divide them."""

    index: int
    experts: tuple[ExpertPart, ...] = ()
    expert_bytes: int = 0
    """All routed experts of the layer together."""
    attention: int = 0
    """Divided by the ranks that share the attention."""
    keys_values: int = 0
    """Divided the same way, down to single heads."""
    feed_forward: int = 0
    """Dense MLP and shared experts, divided by all tensor-parallel ranks."""
    replicated: int = 0
    parameters: int = 0
    """Weights outside the routed experts."""

    @property
    def nbytes(self) -> int:
        return self.expert_bytes + self.attention + self.keys_values + self.feed_forward + self.replicated


@dataclass(frozen=True)
class ModelShape:
    """A model as SGLang's class holds it. Bytes are for all ranks together."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    context_length: int
    layers: tuple[LayerShape, ...]
    draft_layers: tuple[LayerShape, ...]
    embedding: int
    head: int
    other: int
    total_bytes: int
    total_parameters: int
    expert_parameters: int
    """Weights of one routed expert in one layer."""
    kv: KvShape
    heads: int
    quantization: str
    expert_size: int
    hidden_size: int
    scale_block: int
    """The block size of a block-quantised weight's scales, 1 without."""
    family: str = ""
    """The config's ``model_type``."""
    architectures: tuple[str, ...] = ()
    """Class names in the config."""
    draft_parameters: int = 0
    """The part of ``total_parameters`` in draft layers."""
    active_parameters: int = 0
    """Weights that one token of text is computed with: all but draft layers, towers for images and sounds, and the routed
    experts that it is not sent to. Embedding and head count, as with most publishers (OpenAI leaves the embedding out)."""
    shared_parameters: int = 0
    """Weights of shared experts, which every token uses."""
    tower_parameters: int = 0
    """Weights of vision and audio towers."""
    embedding_parameters: int = 0
    tables: tuple[LookupTable, ...] = ()
    """Lookup tables, counted only in the totals."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.experts)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts outside draft layers."""
        return sum(layer.expert_bytes for layer in self.layers)

"""What the planner knows of a model: bytes by layer, and which of them are routed experts."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.plan.kv_cache import KvShape
from sglang_uvm_offload.plan.lookup_tables import LookupTable


@dataclass(frozen=True)
class ExpertPart:
    """One tensor ``[experts, ...]`` of a layer as a server holds it: gate and up projections together, or down."""

    name: str
    nbytes: int
    """Bytes of the largest expert, undivided."""
    split: bool
    """Whether tensor parallelism divides it. An output bias or a single scale is whole on every rank."""


@dataclass(frozen=True)
class LayerShape:
    """The bytes of one decoder layer, by how ranks divide them."""

    index: int
    experts: tuple[ExpertPart, ...] = ()
    expert_bytes: int = 0
    """All routed experts of the layer together."""
    attention: int = 0
    """Divided by the ranks that share the attention."""
    keys_values: int = 0
    """Divided likewise, but at most into single heads."""
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
    """A model as SGLang's class for it holds it: bytes of all ranks together."""

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
    """The config's names of the model's class."""
    draft_parameters: int = 0
    """The part of ``total_parameters`` in draft layers."""
    active_parameters: int = 0
    """Weights that one token of text is computed with: all but draft layers, towers for images and sounds, and the routed
    experts that it is not sent to. Embedding and head count, as with most publishers (OpenAI leaves the embedding out)."""
    shared_parameters: int = 0
    """Of shared experts, which every token uses."""
    tower_parameters: int = 0
    """Of towers for images and sounds."""
    embedding_parameters: int = 0
    tables: tuple[LookupTable, ...] = ()
    """Of which a token reads a few rows; in none of the other sums but the totals."""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.experts)

    @property
    def expert_bytes(self) -> int:
        """All routed experts, draft layers left out."""
        return sum(layer.expert_bytes for layer in self.layers)

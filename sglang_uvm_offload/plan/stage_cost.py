"""What one step costs a pipeline stage, in bytes and operations, and how it streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageCost:
    """Reads and compute of one rank of a pipeline stage: bytes, and floating-point operations for one token."""

    layers: int
    dense_bytes: int
    """Weights other than routed experts, read in every step."""
    dense_flops: float
    expert_layers: tuple[int, ...]
    """For each MoE layer, the bytes of one expert that one rank of the layer's expert-parallel group reads."""
    expert_flops: float
    """One expert for one token, on one rank that holds a slice of it."""
    kv_read_bytes: int
    """One request, for one token at the end of the context."""
    latent_attention: bool = False
    gemm_rate: float = 1.0
    """The rate of the weights' number format, relative to bfloat16."""
    draft_layers: int = 0
    draft_bytes: int = 0
    """Weights that one pass of the draft layers reads, routed experts left out."""
    draft_expert_bytes: int = 0
    """One routed expert of every draft layer."""
    draft_residents: int | None = None
    """Of each draft layer; None: all."""
    draft_hit_rate: float = 1.0
    """The share of their uses that they serve."""


@dataclass(frozen=True)
class Stream:
    """Chunks of ``tokens`` tokens or more stream through ``buffers`` buffers, or into slots."""

    buffers: int
    tokens: int
    into_slots: bool = False

    @property
    def ahead(self) -> bool:
        """Whether a layer's experts come while the layer before computes."""
        return self.into_slots or self.buffers > 1

    def serves(self, tokens: int) -> bool:
        """Whether a chunk of so many tokens streams."""
        return (self.into_slots or self.buffers > 0) and tokens >= self.tokens


IN_PLACE = Stream(buffers=0, tokens=0)
"""No chunk streams."""

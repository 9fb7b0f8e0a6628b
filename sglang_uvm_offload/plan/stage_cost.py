"""The bytes and operations that a step costs a pipeline stage, and how the step streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageCost:
    """Bytes read and floating-point operations per token on one rank of a pipeline stage."""

    layers: int
    dense_bytes: int
    """Weights other than routed experts, read in every step."""
    dense_flops: float
    expert_layers: tuple[int, ...]
    """For each MoE layer, the bytes of one expert that one rank of the layer's expert-parallel group reads."""
    expert_flops: float
    """Operations of one expert for one token on a rank that holds a slice of it."""
    kv_read_bytes: int
    """KV cache bytes read for one token at the end of a request's context."""
    latent_attention: bool = False
    gemm_rate: float = 1.0
    """Compute rate of the weights' number format relative to bfloat16."""
    draft_layers: int = 0
    draft_bytes: int = 0
    """Weights that one pass of the draft layers reads, routed experts left out."""
    draft_expert_bytes: int = 0
    """Bytes of one routed expert, summed over the draft layers."""
    draft_residents: int | None = None
    """Resident experts per draft layer; None: all."""
    draft_hit_rate: float = 1.0
    """Hit rate of the draft layers' residents."""


@dataclass(frozen=True)
class Stream:
    """Chunks of ``tokens`` tokens or more stream through ``buffers`` buffers, or into slots."""

    buffers: int
    tokens: int
    into_slots: bool = False

    @property
    def ahead(self) -> bool:
        """Whether a layer's experts are copied while the previous layer computes."""
        return self.into_slots or self.buffers > 1

    def serves(self, tokens: int) -> bool:
        """Whether a chunk of this many tokens streams."""
        return (self.into_slots or self.buffers > 0) and tokens >= self.tokens


IN_PLACE = Stream(buffers=0, tokens=0)
"""No chunk streams."""

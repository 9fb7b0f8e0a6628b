"""Where the experts of some layers lie, on a rank that has them all."""

from __future__ import annotations

from sglang_uvm_offload.expert_location import ExpertLocation


def located(num_layers: int, num_experts: int) -> list[ExpertLocation]:
    """Each expert at the place of its own number."""
    return [ExpertLocation.trivial(num_experts, range(num_experts))] * num_layers

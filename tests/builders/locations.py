"""Locations of a few layers' experts on a rank that has them all."""

from __future__ import annotations

from sglang_uvm_offload.expert_location import ExpertLocation


def located(num_layers: int, num_experts: int) -> list[ExpertLocation]:
    """Returns locations with each expert at the place of its id."""
    return [ExpertLocation.trivial(num_experts, range(num_experts))] * num_layers

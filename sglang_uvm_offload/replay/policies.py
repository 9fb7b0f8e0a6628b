"""The names of the policies that a replay compares, and its default hardware figures."""

from __future__ import annotations

from sglang_uvm_offload.replay.baselines import NAMES
from sglang_uvm_offload.sizing.machine import PCIE5_GBPS

SLOTS = "slots"
"""All VRAM as slots, without residents."""
SHIPPED = "adaptive"
POLICIES = (*NAMES, SLOTS, SHIPPED)

EXPERT_BYTES = 4 << 20
LINK_GBPS = PCIE5_GBPS
"""The assumed bytes of an expert, and rate of the link (10^9 bytes a second). They scale the bytes and seconds of all policies
alike."""

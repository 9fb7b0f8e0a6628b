"""The names of the policies that a replay compares, and what it takes the hardware to be where nobody says."""

from __future__ import annotations

from sglang_uvm_offload.replay.baselines import NAMES
from sglang_uvm_offload.sizing.machine import PCIE5_GBPS

SHIPPED = "adaptive"
POLICIES = (*NAMES, SHIPPED)

EXPERT_BYTES = 4 << 20
LINK_GBPS = PCIE5_GBPS
"""What an expert is taken to weigh, and the link to carry (10^9 bytes a second): they scale the bytes and seconds of every
policy alike."""

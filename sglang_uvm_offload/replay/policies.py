"""Names of the policies that a replay compares, and its default hardware figures."""

from __future__ import annotations

from sglang_uvm_offload.plan.links import PCIE5
from sglang_uvm_offload.replay.baselines import NAMES

SLOTS = "slots"
"""All VRAM as slots, without residents."""
SHIPPED = "adaptive"
POLICIES = (*NAMES, SLOTS, SHIPPED)

OFFERED = {
    "first_n": "--expert-offload-resident-selection first_n",
    "static": "--expert-offload-adapt warmup",
    SHIPPED: "--expert-offload-adapt continuous",
    SLOTS: "--expert-offload-slots",
}
"""The policies that a server offers, with the flag for each."""
AHEAD = ("static-oracle", "belady")
"""Policies that know the future."""

EXPERT_BYTES = 4 << 20
LINK_GBPS = PCIE5.rate
"""Assumed bytes per expert and link rate (10^9 bytes per second). They scale all policies alike."""

"""The slots that a launch requests, from its flags and its profile."""

from __future__ import annotations

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.residency.slot_split import Slots
from sglang_uvm_offload.routing.profile import Profile


def requested_slots(config: RequestedConfig, slots: int | None, profile: Profile | None) -> Slots:
    """``slots`` is None for ``auto``."""
    shares = profile.slot_shares if profile is not None else {}
    return Slots(slots, shares, config.resident_ids.least_residents if config.resident_ids is not None else 0)

"""The config of a launch as its flags request it, and as its ranks decide it."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import OffloadConfig, RequestedConfig
from sglang_uvm_offload.flags import NEVER
from sglang_uvm_offload.requested_config import parse


def requested_config(**flags: Any) -> RequestedConfig:
    """Makes the requested config from ``flags``, by field."""
    requested = parse({"num_resident": 4, **flags})
    assert requested is not None
    return requested


def served_config(**flags: Any) -> OffloadConfig:
    """Makes the decided config from ``flags``, by field. Nothing streams unless they set the threshold."""
    requested = requested_config(**flags)
    return requested.resolved(stream_tokens=NEVER if requested.stream_tokens is None else None)

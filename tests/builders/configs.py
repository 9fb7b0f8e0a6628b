"""The config of a launch, as its flags ask for it and as its ranks decide it."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import OffloadConfig, RequestedConfig
from sglang_uvm_offload.flags import NEVER
from sglang_uvm_offload.requested_config import parse


def requested_config(**flags: Any) -> RequestedConfig:
    """From ``flags``, by field."""
    requested = parse({"num_resident": 4, **flags})
    assert requested is not None
    return requested


def served_config(**flags: Any) -> OffloadConfig:
    """From ``flags``, by field; nothing streams unless they say when."""
    requested = requested_config(**flags)
    return requested.resolved(stream_tokens=NEVER if requested.stream_tokens is None else None)

"""The config of a launch as its ranks have it."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import NEVER, OffloadConfig
from sglang_uvm_offload.requested_config import parse


def served_config(**flags: Any) -> OffloadConfig:
    """From ``flags``, by field; nothing streams unless they say when."""
    requested = parse({"num_resident": 4, **flags})
    assert requested is not None
    return requested.resolved(stream_tokens=NEVER if requested.stream_tokens is None else None)

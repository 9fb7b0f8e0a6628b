"""Traces small enough to follow by hand."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.routing.trace import Trace


def trace(*requests, experts=4) -> Trace:
    """Requests of one layer, one expert a token."""
    ids = np.concatenate([np.array(request) for request in requests]).reshape(-1, 1, 1)
    return Trace(ids.astype(np.int64), np.array([len(request) for request in requests]), experts)

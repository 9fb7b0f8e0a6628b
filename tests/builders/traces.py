"""Traces small enough to follow by hand."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.routing.guesses import Guesses
from sglang_uvm_offload.routing.trace import Trace


def trace(*requests, experts=4) -> Trace:
    """Makes a trace of ``requests`` with one layer and one expert per token."""
    ids = np.concatenate([np.array(request) for request in requests]).reshape(-1, 1, 1)
    return Trace(ids.astype(np.int64), np.array([len(request) for request in requests]), experts)


def guessing(made: Trace) -> Trace:
    """Returns the trace with a correct guess for each expert, one layer ahead."""
    return Trace(made.ids, made.seq_len, made.num_experts, Guesses(made.ids[:, :, None], np.zeros((made.num_layers, 1), bool)))

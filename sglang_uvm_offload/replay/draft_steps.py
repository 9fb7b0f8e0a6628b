"""What steps with draft tokens would read on a trace: each verifies some of the following tokens and keeps part of them.

A rejected draft token differs from the trace's next token, and its routing was not recorded. It counts with the trace's
routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from sglang_uvm_offload.replay.policies import EXPERT_BYTES, LINK_GBPS
from sglang_uvm_offload.replay.results import DraftReads
from sglang_uvm_offload.replay.simulator import Managed
from sglang_uvm_offload.routing.trace import Trace


def draft_reads(
    trace: Trace,
    residency: float,
    accepted: Sequence[float],
    warmup_fraction: float = 0.5,
    link_gbps: float = LINK_GBPS,
    expert_bytes: int = EXPERT_BYTES,
    step_ms: float = 0.0,
) -> list[DraftReads]:
    """Reads for 0 to ``len(accepted)`` draft tokens. Draft token i is accepted with probability ``accepted[i]`` (0..1) if its
    predecessors were. A step takes ``step_ms`` milliseconds besides its reads over the link."""
    missed, left = _scored(trace, residency, len(accepted), warmup_fraction)
    found = []
    reached = np.array([1.0, *accumulate(accepted, mul)])
    for drafts in range(len(accepted) + 1):
        # A step keeps no token beyond the request's last one.
        kept = float(np.cumsum(reached)[np.minimum(left, drafts + 1) - 1].mean())
        read = float(missed[:, drafts].mean()) * expert_bytes
        seconds = read / (link_gbps * 1e9) + step_ms * 1e-3
        found.append(DraftReads(drafts, kept, read, read / kept, seconds / kept))
    return found


def _scored(trace: Trace, residency: float, most: int, warmup_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays over the scored tokens: ``int[tokens, most + 1]``, the offloaded experts that a step with 0 to ``most`` draft
    tokens uses if it begins at the token, and ``int[tokens]``, the tokens to the request's end. Requests run one at a time. The
    shipped policy keeps the share ``residency`` of each layer's experts resident and follows the trace token by token. The
    first ``warmup_fraction`` of the requests warms up and is left out."""
    used = trace.activated(trace.steps(range(trace.num_requests), 1))
    left = np.repeat(np.cumsum(trace.seq_len), trace.seq_len) - np.arange(len(used))
    manager = Managed(used.shape[1:], round(residency * used.shape[2]))
    missed = np.zeros((len(used), most + 1), dtype=np.int64)
    for token, activated in enumerate(used):
        resident, union = manager.resident, np.zeros_like(activated)
        for drafts in range(most + 1):
            if drafts < left[token]:
                union |= used[token + drafts]
            missed[token, drafts] = np.count_nonzero(union & ~resident)
        manager.step(activated)
    warmup = int(trace.seq_len[: len(trace.split(warmup_fraction)[0])].sum())
    return missed[warmup:], left[warmup:]

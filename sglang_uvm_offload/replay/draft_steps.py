"""What steps with draft tokens would read of a trace: each verifies some of the tokens that follow, and keeps some of these.

A rejected draft token is another one than the trace has next, and nobody recorded its routing. It counts as that of the trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from sglang_uvm_offload.replay.policies import EXPERT_BYTES, LINK_GBPS
from sglang_uvm_offload.replay.simulator import Managed
from sglang_uvm_offload.routing.trace import Trace


@dataclass(frozen=True)
class DraftSteps:
    """What a step that begins at a token would use, by its number of draft tokens: ``int[tokens, numbers]`` experts that are
    offloaded (``missed``) and resident (``hit``). One request at a time; the shipped policy chooses the residents, and follows
    the trace token by token."""

    missed: np.ndarray
    hit: np.ndarray
    left: np.ndarray
    """``int[tokens]``: tokens to the request's end."""
    request: np.ndarray
    """``int[tokens]``"""
    warmup: int
    """The first tokens, which are not scored."""
    per_token: int
    """Experts that a token uses, in all layers together."""

    @classmethod
    def of(cls, trace: Trace, residency: float, most: int, warmup_fraction: float = 0.5) -> DraftSteps:
        """With 0 to ``most`` draft tokens. ``residency`` (0..1) of each layer's experts are resident; the first
        ``warmup_fraction`` of the requests warm up."""
        used = trace.activated(trace.steps(range(trace.num_requests), 1))
        left = np.repeat(np.cumsum(trace.seq_len), trace.seq_len) - np.arange(len(used))
        manager = Managed(used.shape[1:], round(residency * used.shape[2]))
        missed, hit = (np.zeros((len(used), most + 1), dtype=np.int64) for _ in range(2))
        for token, activated in enumerate(used):
            resident, union = manager.resident, np.zeros_like(activated)
            for drafts in range(most + 1):
                if drafts < left[token]:
                    union |= used[token + drafts]
                missed[token, drafts] = np.count_nonzero(union & ~resident)
                hit[token, drafts] = np.count_nonzero(union & resident)
            manager.step(activated)
        request = np.repeat(np.arange(trace.num_requests), trace.seq_len)
        warmup = int(trace.seq_len[: len(trace.split(warmup_fraction)[0])].sum())
        return cls(missed, hit, left, request, warmup, round(float(used.sum(axis=(1, 2)).mean())))


@dataclass(frozen=True)
class DraftReads:
    """Of steps with so many draft tokens, on average over steps that begin at each scored token."""

    drafts: int
    kept_per_step: float
    """Tokens, one of them the target's own."""
    read_bytes_per_step: float
    read_bytes_per_token: float
    """For each kept one."""
    token_seconds: float
    """The time of its share of a step: on the link, and of what a step takes beside."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def draft_reads(
    trace: Trace,
    residency: float,
    accepted: Sequence[float],
    warmup_fraction: float = 0.5,
    link_gbps: float = LINK_GBPS,
    expert_bytes: int = EXPERT_BYTES,
    step_ms: float = 0.0,
) -> list[DraftReads]:
    """For 0 to ``len(accepted)`` draft tokens, each accepted with its share in ``accepted`` (0..1) if those before it were. A
    step takes ``step_ms`` beside its reads over the link."""
    steps = DraftSteps.of(trace, residency, len(accepted), warmup_fraction)
    found = []
    reached = np.array([1.0, *accumulate(accepted, mul)])
    for drafts in range(len(accepted) + 1):
        # A step keeps no token after the request's last one.
        ends = np.minimum(steps.left[steps.warmup :], drafts + 1)
        kept = float(np.cumsum(reached)[ends - 1].mean())
        read = float(steps.missed[steps.warmup :, drafts].mean()) * expert_bytes
        seconds = read / (link_gbps * 1e9) + step_ms * 1e-3
        found.append(DraftReads(drafts, kept, read, read / kept, seconds / kept))
    return found

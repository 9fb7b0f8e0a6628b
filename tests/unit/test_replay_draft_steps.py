"""What steps with draft tokens would read of a trace."""

from __future__ import annotations

import numpy as np

from sglang_uvm_offload.replay.draft_steps import DraftReads, draft_reads
from sglang_uvm_offload.routing.trace import Trace

GB = 10**9


def reads(residency: float) -> list[DraftReads]:
    """Two requests of three tokens, each token with two experts, one of them that of the token before, in one layer of eight.
    The second request is scored."""
    ids = np.arange(6)[:, None, None] + np.array([0, 1])
    return draft_reads(Trace(ids % 8, np.array([3, 3]), 8), residency, [1.0, 1.0, 1.0], link_gbps=1, expert_bytes=GB)


def test_a_step_uses_the_experts_of_its_tokens_and_none_of_the_next_request():
    steps = [[2, 3, 4, 4], [2, 3, 3, 3], [2, 2, 2, 2]]
    assert [one.read_bytes_per_step for one in reads(0.0)] == [sum(missed) / 3 * GB for missed in zip(*steps, strict=True)]


def test_nothing_is_read_where_all_experts_are_resident():
    assert not any(one.read_bytes_per_step for one in reads(1.0))

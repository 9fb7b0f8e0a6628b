"""The KV cache that ``auto`` leaves room for."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_uvm_offload.residency.demand import Demand


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({"model_context": 131_072}, 32768),
        ({"model_context": 131_072, "max_running_requests": 3}, 3 * 32768),
        ({"model_context": 4096, "max_running_requests": 3}, 3 * 4096),
        ({"model_context": 4096}, 32768),
        ({"context_length": 1024}, 32768),
        ({"context_length": 100_001}, 100_032),
        ({"context_length": 100_001, "page_tokens": 256}, 100_096),
        ({"max_running_requests": 2, "context_length": 1025, "page_tokens": 256}, 2560),
        ({"max_total_tokens": 512}, 512),
    ],
)
def test_one_long_request_or_several_short_ones_are_served_where_nobody_says(asked: dict[str, Any], tokens: int) -> None:
    """Not the whole context of the model."""
    assert Demand(**{"model_context": 131_072, **asked}).tokens_of_rank(1) == tokens


def test_groups_share_requests_and_each_has_as_many_tokens_as_a_flag_gives() -> None:
    demand = Demand(4096, max_running_requests=10)
    assert (demand.requests_of_rank(4), demand.tokens_of_rank(4)) == (3, 3 * 4096)
    assert Demand(4096, max_total_tokens=512).tokens_of_rank(4) == 512


def test_it_is_told_by_the_flags_that_change_it() -> None:
    assert str(Demand(4096, max_total_tokens=512)) == "as --max-total-tokens gives them"
    assert str(Demand(131_072, context_length=2048, max_running_requests=3)) == "for 3 requests of 2048 tokens"
    assumed = str(Demand(131_072, context_length=2048))
    assert assumed == (
        "for 1 request of 2048 tokens, or more shorter ones; assumed, and changed by --max-running-requests or "
        "--max-total-tokens"
    )

"""The bytes of a server's pools between the numbers of tokens that SGLang was asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.least_memory import LEAST_TOKENS, LeastMemory
from sglang_uvm_offload.sizing.machine import preset
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.server_pools import ServerPools

MODEL = Path(__file__).parents[1] / "fixtures" / "configs" / "zai-org--GLM-5-FP8" / "config.json"
POOLS = ServerPools(Parallel(tp=8), (((2, 1000), (1002, 11_000), (2002, 31_000)),))


@pytest.mark.parametrize(
    ("tokens", "nbytes"), [(2, 1000), (502, 6000), (1002, 11_000), (1003, 11_020), (3002, 51_000), (1, 990)]
)
def test_pools_grow_linearly_between_the_points_and_beyond(tokens: int, nbytes: int) -> None:
    assert POOLS.nbytes(0, tokens) == nbytes


def test_a_further_token_costs_what_the_last_ones_cost() -> None:
    assert POOLS.token_bytes(0) == 20


def test_a_part_of_a_byte_is_rounded_up() -> None:
    assert ServerPools(Parallel(), (((0, 0), (3, 2)),)).nbytes(0, 1) == 1


@pytest.fixture
def case() -> Case:
    workload = Workload(2002, max_total_tokens=2002)
    made = Case(load(MODEL), preset("8xH20"), workload, Parallel(tp=8), Reserve(), Assumptions())
    return dataclasses.replace(made, pools=POOLS)


def test_a_plan_for_the_ranks_that_were_asked_for_takes_them(case: Case) -> None:
    table = 4 * 2002
    assert case.kv_bytes(0) == 31_000 + table
    assert LeastMemory(case, 1).cache(0) == POOLS.nbytes(0, LEAST_TOKENS)


def test_other_ranks_are_planned_by_the_planners_rules(case: Case) -> None:
    other = dataclasses.replace(case, parallel=Parallel(tp=4))
    assert other.pool_bytes(0) == dataclasses.replace(other, pools=None).pool_bytes(0) > 31_000

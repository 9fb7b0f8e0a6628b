"""Counting the router's picks on the CPU; the GPU kernel is held to the same cases in test_cuda_memory.py."""

import pytest
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ALL_ROWS, ROUTED, IdFormat, Phase


@pytest.fixture
def counters():
    return CpuRoutingCounters(num_layers=2, num_experts=4)


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def test_a_activation_counts_a_step_once_however_many_tokens_use_the_expert(counters):
    counters.begin_step(ALL_ROWS, Phase.DECODE)
    counters.count(0, ids([0, 1], [0, 2], [0, 1]), 0, IdFormat.PLAIN)
    counters.begin_step(ALL_ROWS, Phase.DECODE)
    counters.count(0, ids([0, 3]), 0, IdFormat.PLAIN)
    counts = counters.read()
    assert counts.counts[0, Phase.DECODE, ROUTED].tolist() == [4, 2, 1, 1]
    assert counts.counts[0, Phase.DECODE, ACTIVATIONS].tolist() == [2, 1, 1, 1]
    assert counts.counts[1].sum() == 0
    assert counts.steps == (0, 2)


def test_padding_rows_masked_ids_and_other_ranks_experts_do_not_count(counters):
    counters.begin_step(2, Phase.DECODE)
    counters.count(0, ids([-1, 4], [5, 7], [6, 6]), 4, IdFormat.PLAIN)
    assert counters.read().counts[0, Phase.DECODE, ROUTED].tolist() == [1, 1, 0, 1]
    counters.count(0, ids([3, 8]), 4, IdFormat.PLAIN)
    assert counters.read().counts[0, Phase.DECODE, ROUTED].sum() == 3


def test_packed_ids_lie_in_the_upper_half(counters):
    counters.begin_step(ALL_ROWS, Phase.DECODE)
    counters.count(0, (ids([3, 0]) << 16) | 0x3F80, 0, IdFormat.PACKED)
    assert counters.read().counts[0, Phase.DECODE, ROUTED].tolist() == [1, 0, 0, 1]


def test_a_histogram_counts_tokens_and_activations(counters):
    counters.begin_step(ALL_ROWS, Phase.PREFILL)
    counters.count_histogram(0, torch.tensor([5, 0, 2], dtype=torch.int32))
    counts = counters.read()
    assert counts.counts[0, Phase.PREFILL, ROUTED].tolist() == [5, 0, 2, 0]
    assert counts.counts[0, Phase.PREFILL, ACTIVATIONS].tolist() == [1, 0, 1, 0]


def test_a_layer_that_reads_nothing_in_place_counts_tokens_and_no_activations(counters):
    counters.begin_step(ALL_ROWS, Phase.PREFILL)
    counters.count(0, ids([0, 1], [0, 2]), 0, IdFormat.PLAIN, in_place=False)
    counters.count_histogram(1, torch.tensor([5, 0, 2], dtype=torch.int32), in_place=False)
    counts = counters.read()
    assert counts.counts[:, Phase.PREFILL, ROUTED].tolist() == [[2, 1, 1, 0], [5, 0, 2, 0]]
    assert not counts.activations().any()
    assert counts.steps == (1, 0)

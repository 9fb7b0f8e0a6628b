"""What is said of a measured link, and the slowest of several."""

from __future__ import annotations

import pytest
from builders import links

from sglang_uvm_offload.memory.link import LinkRates
from sglang_uvm_offload.plan.measured_link import expected_rates

FAST = links.rates()


@pytest.mark.parametrize(
    ("link", "engine", "told"),
    [
        (links.measured(), 55.0, []),
        (links.measured(), 0.0, []),
        (links.measured(engine=26.0, sequential=25.0, scattered=25.0), 55.0, ["the copy engine alone reaches 26.0 of 55 GB/s"]),
        (links.measured(engine=26.0, sequential=25.0, scattered=25.0), 0.0, []),
        (links.measured(8, FAST, scattered=35.0), 55.0, ["8 GPUs share the 50.0 GB/s that one alone reads"]),
        (links.measured(scattered=20.0), 55.0, ["neighbouring blocks are read at 51.0 GB/s, so address translation"]),
        (links.measured(sequential=35.0, scattered=35.0), 55.0, ["kernels read more slowly than the copy engine copies (54.0"]),
        (
            links.measured(4, links.rates(sequential=40.0, scattered=20.0), scattered=10.0),
            55.0,
            ["4 GPUs share", "address translation", "kernels read more slowly"],
        ),
    ],
)
def test_each_reason_for_slow_reads_is_told_where_it_holds(link, engine, told):
    reasons = link.why_slow(engine)
    assert len(reasons) == len(told)
    assert all(part in reason for part, reason in zip(told, reasons, strict=True))


@pytest.mark.parametrize(
    ("name", "gbps"), [("NVIDIA H20", 55), ("NVIDIA GeForce RTX 4090", 25), ("NVIDIA GH200 480GB", 382.2), ("Thing", 0)]
)
def test_a_link_is_expected_to_bring_no_more_than_the_memory_behind_it_gives(name, gbps):
    assert expected_rates([(name, 96 << 30), ("Thing", 1)]) == pytest.approx([gbps, 0])


def test_the_slowest_of_several_has_the_lowest_of_each_rate():
    assert LinkRates.slowest([links.rates(50, 40, 30, 20), links.rates(20, 50, 31, 19)]) == LinkRates(20, 40, 30, 19)


def test_one_rank_is_described_once_and_several_also_alone():
    one, four = links.measured().described(), links.measured(4, links.rates(scattered=49.0), scattered=35.0).described()
    assert one == "scattered reads 50.0 GB/s, sequential 51.0, copies by a kernel 50.0, by the copy engine 54.0"
    assert four.startswith("scattered reads 35.0 GB/s")
    assert "with 4 GPUs at once; one alone: scattered reads 49.0 GB/s" in four


def test_the_verdict_names_what_was_expected_where_that_is_known():
    assert links.status(scattered=35.0).verdict() == "this machine reads offloaded experts at 35.0 GB/s, 51.7 expected"
    assert links.status(0.0).verdict() == "this machine reads offloaded experts at 50.0 GB/s"

"""benchmarks/start.py: the table of starts, and what of a log it reads."""

from __future__ import annotations

import pytest

from benchmarks import serve_log
from benchmarks.start import CASES, Rates, Start, table

pytestmark = pytest.mark.sglang


def test_medians_ratios_and_reached_rates_are_in_the_table():
    """1e9 bytes, read at 2 GB/s and copied at 4."""
    seconds = {"plain": (1.0, 2.0, 9.0), "offloaded": (4.0, 3.0, 1.0), "restarted": (1.0, 1.0, 1.0)}
    starts = [
        Start(
            2, cache, server, load, load + 10, [] if server == "plain" else [[{"name": "read", "seconds": load, "nbytes": 1}]]
        )
        for cache, server in CASES
        for load in seconds[server]
    ]
    shown = table(starts, Rates(2.0, {2: 4.0}, {2: 3.0}), 10**9, "a machine")
    assert "Seconds, medians of 3." in shown
    assert "memory is copied at 4.0 GB/s by 2 (3.0 to new pages) threads." in shown
    assert "| 2 | cold | plain | 2.00 | 1.00 | 0.25 | 12.0 |" in shown
    assert "| 2 | cold | offloaded | 3.00 | 1.50 | 0.17 | 13.0 |" in shown
    assert "| 2 | warm | restarted | 1.00 | 0.50 | 0.25 | 11.0 |" in shown
    assert "| ranks | page cache | server | read |" in shown
    assert "| 2 | warm | offloaded | 3.00 |" in shown


def test_the_loads_of_all_ranks_are_read_from_a_log():
    line = "[TP{}] Load weight end. elapsed={} s, type=Qwen3MoeForCausalLM, avail mem=1.00 GB, mem usage=2.00 GB.\n"
    assert serve_log.loads(line.format(0, "1.50") + "Load weight begin.\n" + line.format(1, "2.25")) == [1.5, 2.25]

"""The tables that a GPU session prints of its rows, on the committed logs of real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.figures import NOTHING, lines_of
from benchmarks.gpu.rows import summarise

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
LOGS = sorted(path for path in RESULTS.glob("*-nvidia-*/*.json") if "parts" in json.loads(path.read_text()))


def row(name: str, values: list[float], unit: str = "ms", **labels: Any) -> dict[str, Any]:
    return summarise({"row": name, "unit": unit, "values": values, **labels})


def test_there_are_logs_of_two_gpus():
    assert len({log.parent.name.split("-")[-1] for log in LOGS}) >= 2


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.parent.name} {log.stem}")
def test_no_median_of_a_real_log_is_left_out(log):
    for name, part in json.loads(log.read_text())["parts"].items():
        told = "\n".join(lines_of(part["rows"]))
        for each in part["rows"]:
            if each["values"] and each["row"] not in ("finished", "computes"):
                assert f"{each['median']:.4g}" in told, f"{name} {each}"
        assert max(map(len, told.splitlines())) < 300, f"{name} is too wide to be read"


def test_a_label_that_all_lines_share_makes_the_columns():
    timed = ((64, 1.5), (512, 2.5))
    steps = [row("step", [ms], where=where, tokens=tokens) for tokens, ms in timed for where in ("slots", "host")]
    head, *lines = lines_of([*steps, row("step", [3.5], where="host", tokens=64)])
    assert head == "step, ms  tokens 64  tokens 512"
    assert lines == ["slots     1.5        2.5", "host      1.5 / 3.5  2.5"], "what was measured again stands beside it"


def test_a_label_that_only_some_rows_have_is_left_out_of_the_others():
    rows = [
        row("numa", [rate], "GB/s", node=node, **asked)
        for node in (0, 1)
        for asked, rate in (({}, 1.0), ({"prefers": "CPU"}, 2.0))
    ]
    assert lines_of(rows) == ["numa, GB/s     CPU", "node 0      1  2", "node 1      1  2"]


def test_units_that_differ_stand_beside_their_figures():
    figures = (("read", "GB/s"), ("move", "ms"))
    rows = [row("swap", [2.0, 4.0], unit, figure=figure, mib=mib) for mib in (1, 8) for figure, unit in figures]
    assert lines_of(rows)[1] == "read  3 (2-4) GB/s  3 (2-4) GB/s"


def test_cells_that_would_be_mostly_empty_become_lines():
    rows = [row("startup", [87.0], contender="all", resident=1.0), row("startup", [53.0], contender="some", resident=0.5)]
    assert lines_of(rows) == ["startup, all, resident 1: 87 ms", "startup, some, resident 0.5: 53 ms"]


def test_what_could_not_be_measured_is_told_with_its_reason():
    refused = row("load_left_out", [], load="TMA", memory="managed", reason="cuTensorMapEncodeTiled returned 1")
    assert lines_of([refused]) == ["TMA, managed: cuTensorMapEncodeTiled returned 1"]
    failed = {"contender": "paged_experts", "residency": 0.5, "error": "it did not start"}
    assert lines_of([row("cell", [], "", cell=failed)]) == ["paged_experts 50%: it did not start"]
    assert lines_of([row("finished", [1.0])]) == NOTHING

"""A run of ``benchmarks/serve.py``: servers that import ahead take their turns, and none outlives the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks import serve_run
from benchmarks.contenders import CONTENDERS, Budget
from benchmarks.serve_client import Sizes
from benchmarks.serve_run import Row
from scripts.harness.ahead import IMPORTED
from scripts.harness.patience import patience
from scripts.harness.server import Server
from sglang_uvm_offload.plan.engine_shape import shape_of_config

CONFIG = Path(__file__).resolve().parents[1] / "fixtures" / "models" / "qwen3-235b-a22b.json"
MODEL = shape_of_config("qwen3", json.loads(CONFIG.read_text())["config"], dtype="bfloat16")
STARTS = f"""
import time
print({IMPORTED!r}, flush=True)
time.sleep(0.5)
raise SystemExit("no such flag")
"""


def wanted_run(folder: Path, ahead_seconds: float, served: Callable[[Row], None] = print) -> serve_run.Run:
    return serve_run.Run(
        model=folder,
        out=folder / "out",
        device="cpu",
        contenders=["first_n", "paged_experts", "cpu_offload_gb"],
        residencies=[0.05],
        repeats=1,
        sizes=Sizes((1,), (8,), 8, 1, 2, 1, 1, 1, 64),
        prompts=lambda request, length: [1] * length,
        ahead_seconds=ahead_seconds,
        served=served,
    )


@pytest.mark.parametrize(("seconds", "ahead"), [(0.0, False), (patience(30), True)])
def test_servers_import_before_the_first_turn_if_asked_to(tmp_path, monkeypatch, seconds, ahead) -> None:
    made: list[Server] = []

    def start_of(wanted, own) -> Server:
        made.append(Server(tmp_path, command=[sys.executable, "-c", STARTS]))
        return made[-1]

    monkeypatch.setattr(serve_run, "start_of", start_of)
    monkeypatch.setattr(serve_run, "shape_of", lambda folder: MODEL)
    pids: list[int] = []

    def served(row) -> None:
        if not pids:
            pids.extend(each.process.pid for each in made if each.process)
            assert len(pids) == (3 if ahead else 1)
            assert [psutil.Process(pid).status() for pid in pids[1:]] == [psutil.STATUS_STOPPED] * (2 if ahead else 0)

    rows = serve_run.run(wanted_run(tmp_path, seconds, served), {"rows": []})["rows"]
    assert [row["contender"] for row in rows] == ["resident", "first_n", "paged_experts", "cpu_offload_gb"]
    assert "paged experts need at least" in rows[2]["error"]
    assert ["exit code 1: no such flag" in row["error"] for row in rows] == [True, True, False, True]
    assert [row.get("imported_ahead") for row in rows] == [ahead, ahead, None, ahead]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not any(each.folder.exists() for each in made)


def test_servers_whose_turn_never_comes_are_ended(tmp_path, monkeypatch) -> None:
    def start_of(wanted, own) -> Server:
        return Server(tmp_path, command=[sys.executable, "-c", STARTS])

    monkeypatch.setattr(serve_run, "start_of", start_of)
    turns = [(CONTENDERS["resident"], Budget(MODEL, 1.0, 64))]
    with serve_run.imported(wanted_run(tmp_path, patience(30)), turns) as servers:
        (waiting,) = servers.values()
        assert waiting.process is not None
        pid = waiting.process.pid
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
    assert not psutil.pid_exists(pid)
    assert not waiting.folder.exists()

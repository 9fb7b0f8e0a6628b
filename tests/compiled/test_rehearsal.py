"""The rehearsal of a GPU session (``scripts/rehearse.sh``): its servers run over the stand-in, with the arguments of a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from standin import rehearse
from standin.rehearse import ROOT, environment, failures

from benchmarks import model, serve_client
from benchmarks.link_rates import Rates
from sglang_uvm_offload.plan.engine_shape import shape_of_config


def cell(contender: str, **more: Any) -> dict[str, Any]:
    return {"contender": contender, "error": None, "points": [], "flags": [], **more}


FAILED_POINT = [{"kind": "decode", "size": 1, "error": None}, {"kind": "decode", "size": 4, "error": "HTTP 500"}]


@pytest.mark.parametrize(
    ("served", "told"),
    [
        (cell("resident"), []),
        (cell("paged_experts", error="the server ended"), ["paged_experts: the server ended"]),
        (cell("frequency", points=FAILED_POINT), ["frequency: HTTP 500"]),
        (cell("frequency", points=[{"kind": "decode", "size": 1, "error": serve_client.NOT_RESOLVED + ": noise"}]), []),
        ({"contender": "paged_experts", "error": "not to be served", "points": []}, []),
    ],
)
def test_a_server_that_fails_is_told_though_its_section_is_complete(served, told):
    parts = {"one": {"rows": [{"row": "run"}, {"row": "cell", "cell": served}]}, "link": {"rows": []}}
    assert failures({"parts": parts, "complete": True}) == told


def test_an_unknown_section_is_named_before_any_runs(tmp_path: Path) -> None:
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "tests"))
    command = [sys.executable, "-m", "standin.rehearse", "--out", str(tmp_path), "ops", "oops"]
    said = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert said.returncode == 2
    assert "no section oops: there are ops, slots, runners" in said.stderr
    assert not (tmp_path / "results").exists()


def test_a_compiler_that_is_killed_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is negative."""
    monkeypatch.setattr(rehearse, "environment", lambda out: {"PYTHONPATH": ""})
    monkeypatch.setattr(rehearse, "build_kernels", lambda program, variables: -9 if program == "marlin_build" else 0)
    monkeypatch.setattr(sys, "argv", ["rehearse", "--compile", "--out", str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "")
    assert rehearse.main() == 1


@pytest.mark.nightly
def test_servers_run_on_the_device_that_is_played(tmp_path: Path) -> None:
    """As on a GPU: real backends, decode graphs, experts in managed memory; prompts stream and experts move."""
    rows = tmp_path / "rows"
    command = [sys.executable, "-m", "benchmarks.gpu.server_parts", "most", str(rows), "900", "--small"]
    done = subprocess.run(command, env=os.environ | environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    (run,) = [row["run"] for row in found if row["row"] == "run"]
    assert (run["device"], run["measured"]) == ("NVIDIA H200", False)
    cells = [row["cell"] for row in found if row["row"] == "cell"]
    assert [each["contender"] for each in cells] == ["resident", "frequency"]
    assert failures({"parts": {"most": {"rows": found}}}) == []
    for each in cells:
        assert each["engine"]["moe_runner_backend"] == "triton"
        assert each["engine"]["decode_graph_batches"], "SERVER_ARGS leave decode graphs on"
        assert each["engine"]["batches"]["decode"]["eager"] == 0
    offload = cells[1]["offload"]
    assert offload["backend"] == "uvm"
    assert offload["offloaded_bytes"] == cells[1]["expected_offloaded_bytes"]
    assert min(offload[name] for name in ("zero_copy_bytes", "streamed_bytes", "moves")) > 0
    record = run | {"rows": cells, "measured": True}
    shape = shape_of_config(run["model"]["name"], run["model"]["config"])
    found = model.compare(record, shape, Rates(50.0, 50.0, 50.0), model.machine_of(record))
    assert ("prefill", "streamed") in {(each.kind, each.way) for each in found}, "the cost model takes the server as it was"

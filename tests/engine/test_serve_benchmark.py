"""benchmarks/serve.py as it is run: real servers on a tiny checkpoint, one of which cannot start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import Checkpoints
from serving import FORKING

from benchmarks import serve
from scripts.harness.patience import patience

ROOT = Path(__file__).resolve().parents[2]
SERVE = [sys.executable, "-m", "benchmarks.serve", "--device", "cpu"]
TOO_LONG = 4096
"""Tokens, of a prompt for a model whose context is 2048."""
SMALL = {"samples": 1, "batches": [1, 2], "prompts": [16, TOO_LONG], "prompt_tokens": 8, "short": 1, "long": 9}
SMALL |= {"answers": 3, "answer_tokens": 9, "warmup_tokens": 64}


class Finished:
    """A run that has ended: its folder, what it printed, its rows by contender."""

    def __init__(self, out: Path, ended: subprocess.CompletedProcess[str]):
        self.out, self.ended = out, ended
        self.record: dict[str, Any] = json.loads((out / "run.json").read_text())
        self.rows = {row["contender"]: row for row in self.record["rows"]}

    def points(self, contender: str) -> dict[tuple[str, int], dict[str, Any]]:
        return {(point["kind"], point["size"]): point for point in self.rows[contender]["points"]}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe")


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out = tmp_path_factory.mktemp("serve") / "run"
    contenders = "frequency,paged_experts"
    command = [*SERVE, "--model", str(checkpoint), "--contenders", contenders, "--out", str(out)]
    command += ["--repeats", "1", "--sizes", json.dumps(SMALL)]
    ended = subprocess.run(command, env=os.environ | FORKING, capture_output=True, text=True, timeout=patience(900))
    return Finished(out, ended)


@pytest.mark.nightly
def test_the_plugin_answers_as_the_resident_server_does(finished: Finished) -> None:
    assert finished.ended.returncode == 0, finished.ended.stderr[-3000:]
    row = finished.rows["frequency"]
    assert row["error"] is None
    assert row["outputs"] == {"same": True, "requests": 3, "first_difference": None}
    assert row["answers"] == finished.rows["resident"]["answers"]
    assert [len(ids) for ids in row["answers"]] == [9, 9, 9]


@pytest.mark.nightly
def test_what_is_offloaded_is_the_budget_s_share(finished: Finished) -> None:
    model, row, points = finished.record["model"], finished.rows["frequency"], finished.points("frequency")
    state = row["offload"]
    assert state["offloaded_bytes"] == row["expected_offloaded_bytes"] == model["expert_bytes"] // 2
    assert state["resident_experts"] == model["moe_layers"] * model["experts"] // 2
    assert state["warmup_done"]
    decoded = [point for (kind, _), point in points.items() if kind == "decode" and not point["error"]]
    assert all(0 < point["read_bytes"] < state["offloaded_bytes"] for point in decoded)
    assert points["prefill", 16]["read_bytes"] > 0
    assert finished.rows["resident"].get("offload") is None


@pytest.mark.nightly
def test_what_fails_is_a_row_or_a_point_with_its_reason_and_the_others_have_all_figures(finished: Finished) -> None:
    failed = finished.rows["paged_experts"]
    assert "the server ended with exit code" in failed["error"]
    assert "NVIDIA" in failed["error"]
    assert (finished.out / failed["log"]).stat().st_size > 0
    assert failed["points"] == []
    for name in ("resident", "frequency"):
        row, points = finished.rows[name], finished.points(name)
        assert "longer than the model's context length" in points["prefill", TOO_LONG]["error"]
        assert points["prefill", 16]["seconds"] > 0
        assert {size for kind, size in points if kind == "decode"} == {1, 2}
        assert row["memory"]["host_pss_bytes"] > 500 << 20, "SGLang's processes take more than that"
        assert row["memory"]["vram_bytes"] is None
        assert row["startup_seconds"] > 1


@pytest.mark.nightly
def test_the_report_says_first_that_speed_means_nothing_and_no_file_names_a_path_of_this_machine(
    finished: Finished, checkpoint: Path
) -> None:
    text = (finished.out / "report.md").read_text()
    assert "speed means nothing here" in text.splitlines()[2]
    assert "| paged_experts 50% |" in text
    assert f"- frequency 50%, prefill {TOO_LONG}: HTTP 400" in text
    for path in finished.out.rglob("*"):
        if path.suffix in (".json", ".md", ".log"):
            assert not [own for own in (str(checkpoint), str(ROOT), sys.prefix) if own in path.read_text()], path.name
    said = subprocess.run([sys.executable, "-m", "benchmarks.model", str(finished.out)], capture_output=True, text=True)
    assert said.returncode == 0
    assert "nothing to compare: the run is of CPU" in said.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_server(how: signal.Signals, checkpoint: Path, tmp_path: Path) -> None:
    command = [*SERVE, "--model", str(checkpoint), "--contenders", "first_n", "--out", str(tmp_path / "run")]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        servers = wait_for_children(run.pid)
        run.send_signal(how)
        run.wait(patience(60))
        gone, alive = psutil.wait_procs(servers, timeout=patience(30))
        assert not alive
        assert gone
    finally:
        run.kill()


def wait_for_children(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + patience(60)
    while time.monotonic() < deadline:
        found = [child for child in psutil.Process(pid).children() if "sglang.launch_server" in child.cmdline()]
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError("no server was started")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--contenders", "first"], "--contenders first: there are resident, first_n"),
        (["--sizes", '{"batch": 1}'], "--sizes batch: there are batches, prompts"),
        (["--residency", "1.5"], "'1.5': must be numbers from 0 to 1"),
        (["--repeats", "0", "--model", "nowhere"], "--repeats 0: must be 1 or more; --model nowhere: must be a checkpoint's"),
    ],
)
def test_a_bad_argument_is_named_with_what_would_be_right(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--device", "cpu", *arguments])
    assert told in capsys.readouterr().err

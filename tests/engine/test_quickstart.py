"""``bash scripts/quickstart.sh`` as the README shows it, on a CPU: its output, the files that it keeps, and its arguments."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import pages
from builders.pages import ROOT
from serving import Engines

from scripts import quickstart
from scripts.harness.server import EngineFailed, Server
from sglang_uvm_offload.plan.machine import preset

WORDS = [*pages.of_kind("bash scripts/quickstart.sh"), ["bash", "scripts/quickstart.sh", "--", "--tp-size", "2"]]
"""The first is the README's; other models and two ranks are for the night."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(words, marks=[pytest.mark.nightly] if i else [], id=" ".join(words)) for i, words in enumerate(WORDS)],
)
def ran(request: pytest.FixtureRequest, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The script's exit code, its output, and the statuses that it read. Its servers run in forks, like other tests'."""
    states: list[dict[str, Any]] = []
    status, printed = quickstart.status, tmp_path_factory.mktemp("quickstart") / "printed"

    def forked(checkpoint: Path, command: list[str], **options: Any) -> Server:
        return engines.server(checkpoint, command=command, **options)

    def seen(server: Server) -> dict[str, Any]:
        states.append(status(server))
        return states[-1]

    with pytest.MonkeyPatch.context() as patch, printed.open("w") as output:
        patch.setattr(quickstart, "Server", forked)
        patch.setattr(quickstart, "status", seen)
        patch.setattr(sys, "argv", ["quickstart.py", "--device", "cpu", *request.param[2:]])
        patch.setattr(sys, "stdout", output)
        code = quickstart.main()
    yield {"words": request.param, "code": code, "states": states, "printed": (text := printed.read_text())}
    for folder in re.findall(r"its log is (\S+)/offloaded\.log", text):
        shutil.rmtree(folder)


def test_all_answers_are_the_same(ran):
    assert ran["code"] == 0, ran["printed"]
    prompts = (*quickstart.ENGLISH, *quickstart.MORE_ENGLISH, *quickstart.CODE, *quickstart.MORE_CODE)
    assert f"All {len(prompts)} answers are the same with " in ran["printed"]


def test_the_hit_rates_are_those_of_the_servers_status(ran):
    first, _, english, code, _, last = ran["states"]
    routed, hits = (
        [sum(layer[name] for layer in state["layers"]) for state in (english, code)] for name in ("routed", "routed_resident")
    )
    stale = (hits[1] - hits[0]) / (routed[1] - routed[0])
    expected = [english["hit_rate_before"], english["hit_rate_since"], stale, last["hit_rate_since"]]
    table = ran["printed"].partition("Hit rate: ")[2]
    assert re.findall(r"[\d.]+%", table) == [f"{rate:.1%}" for rate in expected]
    assert first["routed"] == 0, "the health check's tokens would count"
    tokens = int(re.search(r"the first (\d+) tokens", table).group(1))
    before = tokens * english["routed"] / english["tokens"]
    both = before * english["hit_rate_before"] + (english["routed"] - before) * english["hit_rate_since"]
    assert both == pytest.approx(hits[0], abs=1)


def test_residents_of_the_trained_model_follow_its_traffic(ran):
    if ran["words"][2:3] not in ([], ["--"]):
        pytest.skip("the routing of another model does not depend on the topic")
    before, since, stale, readvised = [float(rate) for rate in re.findall(r"([\d.]+)%  #", ran["printed"])]
    assert before < 50 < since
    assert stale < since - 20
    assert readvised > stale + 20


def test_its_logs_and_the_report_stay(ran):
    offloaded, plain = [Path(path) for path in re.findall(r"\S+\.log$", ran["printed"].partition("Logs ")[2], re.M)]
    assert "residents chosen from the routing of " in offloaded.read_text()
    assert "Expert offload" not in plain.read_text()
    (page,) = re.findall(r"Report +(\S+\.html)$", ran["printed"], re.M)
    assert re.search(r"Ready at (\S+);", ran["printed"]).group(1) in Path(page).read_text()


def test_the_commands_to_try_next_parse(ran):
    lines = ran["printed"].partition("\nNext")[2].splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("  sglang-uvm-offload")]
    plan, doctor = [pages.parse_subcommand(words[1:]) for words in commands]
    assert preset(plan.machine)
    assert doctor.launch


def test_the_script_hands_its_arguments_over(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    words = ["bash", str(ROOT / "scripts/quickstart.sh"), "model", "--device", "cpu", "--", "--help"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT), "-m", "scripts.quickstart", str(model), "--device", "cpu", "--", "--help"]


def test_help_installs_nothing_and_needs_no_package(tmp_path: Path):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "VENV": str(tmp_path / "environment")}
    words = ["bash", str(ROOT / "scripts/quickstart.sh"), "deepseek_v3", "--help"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert "--num-resident N" in done.stdout
    assert not (tmp_path / "environment").exists()


def test_flags_after_the_dashes_are_the_servers_and_ranks_get_a_core_each():
    args = quickstart.parse_arguments(["deepseek_v3", "--", "--tp", "2", "--mem-fraction-static", "0.2"])
    assert args.model == "deepseek_v3"
    server = Server(quickstart.LEARNED, **quickstart.server_options(args, on_cpu=True))
    assert "--mem-fraction-static 0.2" in " ".join(server.command)
    assert "--tp-size 2" in " ".join(server.command)
    assert len(server.env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    server.folder.rmdir()


def test_answers_that_differ_end_it_with_both(capsys):
    assert quickstart.compare({"a": "x", "b": "y"}, {"a": "x", "b": "z"}, "6 of 16") == 1
    said = capsys.readouterr().out
    assert "offloaded  'y'" in said
    assert "plain      'z'" in said
    assert "1 of 2 answers differ" in said


def test_a_server_that_fails_ends_it_with_the_reason(tmp_path: Path, monkeypatch, capsys):
    def fails(*_: Any, **__: Any) -> Server:
        raise EngineFailed("the server ended with exit code 1", tmp_path / "none")

    monkeypatch.setattr(quickstart, "Server", fails)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--device", "cpu"])
    assert quickstart.main() == 1
    said = capsys.readouterr()
    assert "exit code 1" in said.err
    assert "Result" not in said.out
    Path(re.search(r"The logs are in (.+)$", said.err).group(1)).rmdir()

"""``bash scripts/quickstart.sh`` as the README gives it: its environment, and all that the script does, on a CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import pages
from builders.pages import ROOT
from serving import Engines

from scripts import quickstart
from scripts.harness.server import EngineFailed, Server

WORDS = pages.of_kind("bash scripts/quickstart.sh")
"""The first is the README's; those for other models at night."""


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=[pytest.mark.nightly] if i else [], id=" ".join(words)) for i, words in enumerate(WORDS)],
)
def test_it_ends_with_what_was_shown_and_how_long_it_took(words, engines: Engines, monkeypatch, capsys):
    """Its servers run in forks, as those of other tests do."""

    def forked(checkpoint: Path, command: list[str], **options: Any) -> Server:
        return engines.server(checkpoint, command=command, **options)

    monkeypatch.setattr(quickstart, "Server", forked)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", *words[2:], "--device", "cpu"])
    assert quickstart.main() == 0
    *_, shown, took = capsys.readouterr().out.splitlines()
    assert shown.startswith(f"Shown: {len(quickstart.PROMPTS)} answers are the same")
    whole, answers = map(int, re.fullmatch(r"It took (\d+) s, and (\d+) s to the answers .*CPU cores\.", took).groups())
    assert 0 <= answers <= whole


def test_the_script_hands_its_arguments_over(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$PWD" "$@"\n')
    python.chmod(0o755)
    model = tmp_path / "model"
    model.mkdir()
    words = ["bash", str(ROOT / "scripts/quickstart.sh"), "model", "--device", "cpu"]
    env = {"PATH": "/usr/bin:/bin", "PYTHON": str(python)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(ROOT), "-m", "scripts.quickstart", str(model), "--device", "cpu"]


def test_a_server_that_fails_ends_it_with_the_reason(tmp_path: Path, monkeypatch, capsys):
    def fails(*_: Any, **__: Any) -> Server:
        raise EngineFailed("the server ended with exit code 1", tmp_path / "none")

    monkeypatch.setattr(quickstart, "Server", fails)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--device", "cpu"])
    assert quickstart.main() == 1
    said = capsys.readouterr()
    assert "exit code 1" in said.err
    assert "It took" not in said.out

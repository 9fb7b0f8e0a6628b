"""Commands that are started in the folder of a downloaded model run none of its code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from builders.hostile import LIBRARIES, Hostile
from builders.managers import Rank, config
from builders.profiles import saved, some
from builders.traces import trace

from scripts.harness.patience import patience

ROOT = Path(__file__).parents[2]
MODELS = Path(__file__).parents[1] / "fixtures" / "models"
INSTALLED = "import sys\nfrom sglang_uvm_offload.cli.main import main\nsys.exit(main())\n"
"""What pip writes to ``bin``."""
COMMANDS = {
    "plan": ["config.json", "--machine", "1xH200"],
    "replay": ["trace.npz", "--residency", "0.5", "--policy", "static"],
    "profile": ["profile.npz", "--out", "merged.npz"],
    "report": ["info.json", "--out", "page.html"],
}


def filled(hostile: Hostile) -> Hostile:
    """With what the commands read."""
    shutil.copy(MODELS / "glm-4.5-air.json", hostile.folder / "config.json")
    trace([0, 2, 2], [2, 2, 1, 2]).save(hostile.folder / "trace.npz")
    saved(hostile.folder / "profile.npz", some())
    state = {"expert_offload": Rank(config()).status()}
    (hostile.folder / "info.json").write_text(json.dumps({"internal_states": [state]}))
    return hostile


def ran_in(hostile: Hostile, python: list[str], command: str) -> list[str]:
    """The code of the folder that ran."""
    words = [sys.executable, *python, command, *COMMANDS[command]]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        words, cwd=hostile.folder, env=variables, capture_output=True, text=True, timeout=patience(120), check=False
    )
    assert ended.returncode in (0, 1), ended.stderr
    assert ended.stdout
    return hostile.ran


@pytest.mark.parametrize("command", COMMANDS)
def test_an_installed_command_runs_nothing_of_its_folder(command: str, tmp_path: Path) -> None:
    (tmp_path / "sglang-uvm-offload").write_text(INSTALLED)
    hostile = filled(Hostile(tmp_path / "model"))
    assert ran_in(hostile, [str(tmp_path / "sglang-uvm-offload")], command) == []


@pytest.mark.parametrize("command", ["plan", "report"])
def test_the_module_runs_no_library_of_its_folder(command: str, tmp_path: Path) -> None:
    """What Python itself imports for ``-m`` is out of our hands."""
    hostile = filled(Hostile(tmp_path / "model", names=set(LIBRARIES) - {"sglang_uvm_offload"}))
    assert ran_in(hostile, ["-m", "sglang_uvm_offload.cli.main"], command) == []

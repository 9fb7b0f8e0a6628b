"""The command starts without what takes seconds to import: each subcommand imports what it uses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from builders.managers import Rank, config
from builders.profiles import saved, some

from scripts.harness.patience import patience
from sglang_uvm_offload.cli.main import SUBCOMMANDS

HEAVY = ("torch", "sglang", "matplotlib")
MODELS = Path(__file__).parents[1] / "fixtures" / "models"
PROBE = """
import json, sys
from sglang_uvm_offload.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print()
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def imported(*words: str) -> tuple[int, set[str]]:
    """The command's exit code, and which of the libraries that take long to import a fresh process imported for it."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], capture_output=True, text=True, timeout=patience(120), check=True
    )
    code, modules = json.loads(done.stdout.splitlines()[-1])
    return code, {name for name in HEAVY if name in modules}


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--version", "--help", *(f"{name} --help" for name in SUBCOMMANDS)])
def test_help_imports_nothing_heavy(words):
    assert imported(*words.split()) == (0, set())


@pytest.mark.slow
@pytest.mark.parametrize("machine", [["--machine", "8xH20"], []], ids=["named", "this one"])
def test_a_plan_imports_nothing_heavy(machine):
    assert imported("plan", str(MODELS / "glm-4.5-air.json"), *machine)[1] == set()


def test_profiles_are_shown_and_merged_with_nothing_heavy(tmp_path):
    assert imported("profile", str(saved(tmp_path / "a.npz", some())), "--out", str(tmp_path / "b.npz")) == (0, set())


@pytest.mark.slow
def test_a_report_imports_what_draws_and_nothing_else_heavy(tmp_path):
    state = {"expert_offload": Rank(config()).status()}
    (tmp_path / "info.json").write_text(json.dumps({"internal_states": [state]}))
    assert imported("report", str(tmp_path / "info.json"), "--out", str(tmp_path / "page.html")) == (0, {"matplotlib"})


def test_a_report_of_nothing_does_not_wait_for_what_draws(tmp_path):
    assert imported("report", str(tmp_path / "none"), "--out", str(tmp_path / "page.html")) == (2, set())

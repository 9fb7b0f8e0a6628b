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
found = []
for words in json.loads(sys.argv[1]):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    found.append([code, sorted({name.partition(".")[0] for name in sys.modules})])
print()
print(json.dumps(found))
"""


def imported(*commands: list[str]) -> list[tuple[int, set[str]]]:
    """The exit code of each command in a fresh process, and which of the libraries that take long to import are imported by
    then."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands)], capture_output=True, text=True, timeout=patience(120), check=True
    )
    return [(code, {name for name in HEAVY if name in modules}) for code, modules in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
def test_help_plans_and_profiles_import_nothing_heavy(tmp_path):
    helped = [["--version"], ["--help"], *([name, "--help"] for name in SUBCOMMANDS)]
    profiled = ["profile", str(saved(tmp_path / "a.npz", some())), "--out", str(tmp_path / "b.npz")]
    planned = ["plan", str(MODELS / "glm-4.5-air.json")]
    found = imported(*helped, profiled, [*planned, "--machine", "8xH20"], planned)
    assert found[:-2] == [(0, set())] * (len(helped) + 1)
    assert [heavy for _, heavy in found[-2:]] == [set(), set()]


@pytest.mark.slow
def test_a_report_imports_what_draws_once_there_is_something_to_draw(tmp_path):
    state = {"expert_offload": Rank(config()).status()}
    (tmp_path / "info.json").write_text(json.dumps({"internal_states": [state]}))
    commands = (["report", str(tmp_path / name), "--out", str(tmp_path / "page.html")] for name in ("none", "info.json"))
    assert imported(*commands) == [(2, set()), (0, {"matplotlib"})]

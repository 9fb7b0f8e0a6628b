"""Commands of the documents that need no server, run as they stand there, in a folder that holds what they name."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz
import numpy as np
import pytest
from builders import pages
from builders.pages import ROOT
from builders.profiles import MODEL, saved, some

from scripts.harness.patience import patience
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.files.cache import cache_root
from sglang_uvm_offload.routing.trace import Trace

pytestmark = pytest.mark.sglang

CONFIGS = {"zai-org/GLM-5-FP8": "glm-5-fp8", "MODEL": "glm-5-fp8"}
"""The config file that stands for each model: ``plan`` takes a path where there is one, before it asks the Hub."""


def every(kind: str):
    return pytest.mark.parametrize("words", pages.of_kind(kind), ids=" ".join)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where a reader has the models, a trace and profiles, and the checkout's pages."""
    for model, name in CONFIGS.items():
        (tmp_path / model).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / f"tests/fixtures/models/{name}.json", tmp_path / model)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(16)[:2] for _ in range(40 * 2)]).reshape(40, 2, 2)
    Trace(ids, np.full(4, 10), 16).save(tmp_path / "TRACE.npz")
    model = dataclasses.replace(MODEL, moe_layers=(0, 1), num_experts=16)
    for name in ("MODEL", "A", "B"):
        saved(tmp_path / f"{name}.npz", some(model=model))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made_by(words: list[str], flag: str) -> list[Path]:
    return [Path(words[words.index(flag) + 1])] if flag in words else []


@every("sglang-uvm-offload plan")
def test_a_plan_is_made_and_the_page_shows_it(here, words, capsys):
    assert main(words[1:]) == 0
    said = capsys.readouterr().out
    (shown,) = re.findall(r"<!-- plan:8xH20 -->\n(.*?)\n<!-- /plan:8xH20 -->", (ROOT / "docs/tuning.md").read_text(), re.S)
    assert [line for line in shown.splitlines() if line.strip() not in said] == []


@every("sglang-uvm-offload profile")
def test_profiles_are_merged(here, words):
    assert main(words[1:]) == 0
    assert all(path.stat().st_size for path in made_by(words, "--out"))


@every("sglang-uvm-offload replay")
def test_a_trace_is_replayed(here, words, capsys):
    before = Path("MODEL.npz").read_bytes()
    assert main(words[1:]) == 0
    assert "scored: " in capsys.readouterr().out
    assert ("--into" in words) == (Path("MODEL.npz").read_bytes() != before)


@every("python -m benchmarks.docs_tables")
def test_the_page_that_a_script_writes_stays_as_it_is(here, words, monkeypatch):
    (here / "tests").symlink_to(ROOT / "tests")
    (here / "docs").mkdir()
    *_, page = words
    shutil.copy(ROOT / page, here / page)
    monkeypatch.setattr(sys, "argv", words[2:])
    runpy.run_module(words[2], run_name="__main__")
    assert (here / page).read_text() == (ROOT / page).read_text()


@every("bash scripts/fuzz.sh")
def test_the_fuzzing_takes_the_number_of_inputs(words, capsys):
    """``test_fuzz.py`` runs every target."""
    with pytest.raises(SystemExit) as ended:
        fuzz.main([words[-1], "--help"])  # the number is parsed first
    assert ended.value.code == 0


@every("bash scripts/test.sh")
def test_the_tests_are_run_by_pytest(words, tmp_path, monkeypatch):
    """Those that are named; all of them are what runs this. Nothing is installed, and this Python prints its arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin/python").chmod(0o755)
    stamp = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()[:16]
    (tmp_path / f".installed-{stamp}").touch()
    monkeypatch.setenv("VENV", str(tmp_path))
    ran = subprocess.run([*words, "tests/unit"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=patience(60))
    assert ran.stdout.split() == ["-m", "pytest", "--durations=25", "tests/unit"]


@every("rm")
def test_what_is_to_be_removed_is_what_the_package_leaves(words, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Path(words[-1]).expanduser() == cache_root()

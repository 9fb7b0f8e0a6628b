"""The suite fails where a tier takes more of the processor than it may, whoever took it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
CONFTEST = """
import processor_time
processor_time.machine = lambda: %s * processor_time.spent()
processor_time.CEILINGS = {"unit": 1.0}
processor_time.loop = lambda: %s * processor_time.LOOP_SECONDS
def pytest_configure(config):
    config.pluginmanager.register(processor_time.ProcessorTime(limited=%s), "processor_time")
"""
BURNS = '''
import subprocess, sys
BURN = """
import time
end = time.process_time() + 1.3
while time.process_time() < end: pass
"""
def test_itself():
    exec(BURN)
def test_waited():
    subprocess.run([sys.executable, "-c", BURN], check=True)
def test_left():
    global left  # runs on, until this process ends
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    left = subprocess.Popen([sys.executable, "-c", BURN + "print(flush=True); input()"], **pipes)
    left.stdout.readline()
def test_nothing(): ...
'''


def run(
    folder: Path, *arguments: str, others: float = 0.0, slowness: float = 1.0, limited: bool = True
) -> subprocess.CompletedProcess[str]:
    (folder / "tests" / "unit").mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST % (1 + others, slowness, limited))
    (folder / "tests" / "unit" / "test_burns.py").write_text(BURNS)
    command = [sys.executable, "-m", "pytest", "-q", "tests/unit", *arguments]
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["itself"], ["left"], ["waited", "-n", "1"]], ids=" ".join)
def test_a_tier_above_its_ceiling_fails_the_run(tmp_path: Path, arguments: list[str]) -> None:
    ended = run(tmp_path, "-k", *arguments)
    assert ended.returncode == 1, ended.stdout
    assert "1 passed" in ended.stdout
    assert "s of at most 1" in ended.stdout


@pytest.mark.parametrize(
    ("test", "how"),
    [("nothing", {}), ("itself", {"slowness": 9.0}), ("itself", {"limited": False}), ("itself", {"others": 0.5})],
    ids=["below it", "on a slow machine", "some tests alone", "beside other programs"],
)
def test_otherwise_it_does_not(tmp_path: Path, test: str, how: dict[str, Any]) -> None:
    ended = run(tmp_path, "-k", test, **how)
    assert ended.returncode == 0, ended.stdout
    assert ("others took 50% of what this run did" in ended.stdout) == ("others" in how)

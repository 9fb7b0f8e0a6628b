"""Builds this checkout's wheel, and an environment outside the checkout where ``pip`` installs it beside SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

from scripts.harness.patience import patience

ROOT = Path(__file__).parents[2]


def tracked() -> list[str]:
    """Returns the checkout's tracked files, relative to it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if (ROOT / name).is_file()]


def build_wheel(folder: Path, names: Iterable[str] | None = None) -> Path:
    """Builds the wheel in ``folder`` from a copy of the files ``names``, by default the tracked ones, so that it cannot
    depend on others."""
    source = folder / "source"
    for name in tracked() if names is None else names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    (path,) = folder.glob("*.whl")
    return path


class Installed:
    """A virtual environment in ``folder`` that has the wheel and also sees this environment's packages.

    Those are on its path after the wheel. It does not read this environment's ``.pth`` files, one of which leads to the
    checkout. Programs run in ``outside``, a folder beside it."""

    def __init__(self, wheel: Path, folder: Path):
        self.folder, self.outside = folder / "venv", folder / "outside"
        self.outside.mkdir()
        venv.create(self.folder, with_pip=False, symlinks=True)
        self.python = self.folder / "bin" / "python"
        self.base = self.site / "base.pth"
        self.base.write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
        self.pip("install", "--no-deps", "--no-index", str(wheel))

    @property
    def site(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    @property
    def environment(self) -> dict[str, str]:
        """Returns the environment without variables that lead to the checkout."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PYTHONPATH": "", "PATH": path}

    def pip(self, *arguments: str) -> None:
        pip("--python", str(self.python), *arguments)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of this environment by its name in ``bin``."""
        program, *arguments = map(str, command)
        words = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            words, env=self.environment, cwd=self.outside, capture_output=True, text=True, timeout=patience(600)
        )


def pip(*arguments: str) -> None:
    words = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]

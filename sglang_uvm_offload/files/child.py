"""Starts child processes that run no code of the current folder, which may be a downloaded model.

``python -m`` and ``-c`` put the current folder first in ``sys.path``, and so do empty entries of ``PYTHONPATH``. Run as a
program, this file is the child's first step: ``python .../files/child.py MODULE ARGUMENT...``. It runs the module as ``-m``
does, with this very package, wherever the parent found it.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

NEUTRAL = "/"
"""The folder in which children run: relative names that something looks up find nothing there."""


def run_module(module: str, *arguments: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a module of this package or an installed one in another Python. Paths among ``arguments`` must be absolute. Raises
    ``subprocess.TimeoutExpired`` after ``seconds``, and ``OSError`` if Python does not start."""
    return run([sys.executable, os.path.abspath(__file__), module, *arguments], seconds)


def run(command: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """The same for any program, whose path must be absolute. Nothing is on its standard input."""
    return subprocess.run(
        command,
        cwd=NEUTRAL,
        env=_environment(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """``PYTHONSAFEPATH`` (Python 3.11) reaches grandchildren too, unlike ``-P``."""
    named = [os.path.abspath(entry) for entry in ours.get("PYTHONPATH", "").split(os.pathsep) if entry]
    env = {name: value for name, value in ours.items() if name != "PYTHONPATH"}
    return {**env, **({"PYTHONPATH": os.pathsep.join(named)} if named else {}), "PYTHONSAFEPATH": "1"}


def _main() -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 puts this file's folder there, with names such as ``cache``
        del sys.path[0]
    _import_this_package()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _import_this_package() -> None:
    """The parent may have found it in a folder that is not in the child's ``sys.path``, such as a checkout's."""
    package = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(package.name, package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _main()

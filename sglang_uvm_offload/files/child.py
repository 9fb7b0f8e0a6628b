"""Starts child processes that run no code from the current folder, which may be a downloaded model.

``python -m``, ``python -c`` and empty entries of ``PYTHONPATH`` all put the current folder into ``sys.path``. So the child
starts by running this file as a program, ``python .../files/child.py MODULE ARGUMENT...``. It then runs the module as ``-m``
would, with this same package, wherever the parent found it.
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
"""The folder in which children run, where relative names find nothing."""


def run_module(module: str, *arguments: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a module of this package, or an installed one, in another Python process. Paths in ``arguments`` must be absolute.
    Raises ``subprocess.TimeoutExpired`` after ``seconds``, and ``OSError`` if Python does not start."""
    return run([sys.executable, os.path.abspath(__file__), module, *arguments], seconds)


def run(command: Sequence[str], seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """The same for any program, given by its absolute path. Its standard input is empty."""
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
    """Set ``PYTHONSAFEPATH`` (Python 3.11), which also affects grandchildren, unlike ``-P``."""
    named = [os.path.abspath(entry) for entry in ours.get("PYTHONPATH", "").split(os.pathsep) if entry]
    env = {name: value for name, value in ours.items() if name != "PYTHONPATH"}
    return {**env, **({"PYTHONPATH": os.pathsep.join(named)} if named else {}), "PYTHONSAFEPATH": "1"}


def _main() -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 adds this file's folder, with modules such as ``cache``
        del sys.path[0]
    _import_this_package()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _import_this_package() -> None:
    """Import it by its path: the parent may have found it in a folder that is not in the child's ``sys.path``."""
    package = Path(__file__).parents[1]
    spec = importlib.util.spec_from_file_location(package.name, package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    _main()

"""Children that this package starts run nothing of the current folder, and find what their parent found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders.hostile import Hostile

import sglang_uvm_offload
from sglang_uvm_offload.files import child

SAYS = "import json, os, sys, sglang_uvm_offload as it\nprint(json.dumps([it.__file__, os.getcwd(), sys.path, sys.argv[1:]]))"


@pytest.fixture
def says(tmp_path: Path) -> Path:
    """A folder that holds a module ``says`` and another package of our name."""
    folder = tmp_path / "tools"
    (folder / "sglang_uvm_offload").mkdir(parents=True)
    (folder / "sglang_uvm_offload" / "__init__.py").write_text("raise ImportError('another package')\n")
    (folder / "says.py").write_text(SAYS)
    return folder


def said(ended: subprocess.CompletedProcess[str]) -> list:
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.parametrize("packages", [False, True], ids=["files", "packages"])
@pytest.mark.parametrize("path", [None, ":", ":{tools}", "{tools}::{tools}"])
def test_nothing_of_the_current_folder_is_imported(packages, path, says, tmp_path, monkeypatch):
    hostile = Hostile(tmp_path / "model", packages)
    monkeypatch.chdir(hostile.folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if path is not None:
        monkeypatch.setenv("PYTHONPATH", path.format(tools=says))
    module = "says" if path and "tools" in path else "json.tool"
    ended = child.run_module(module, "--help")
    assert (ended.returncode, hostile.ran) == (0, []), ended.stderr
    if module == "says":
        assert str(hostile.folder) not in said(ended)[2]


def test_the_child_has_the_parents_package_what_it_was_given_and_the_users_path(says, monkeypatch):
    monkeypatch.chdir(says.parent)
    monkeypatch.setenv("PYTHONPATH", "tools")
    package, folder, path, arguments = said(child.run_module("says", "a b", "--c"))
    assert (package, folder, arguments) == (sglang_uvm_offload.__file__, "/", ["a b", "--c"])
    assert str(says) in path, "a relative folder means what it did"


def test_a_python_without_safe_paths_does_not_import_from_this_files_folder(says, tmp_path):
    """As Python 3.10, which does not know the variable."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {"PYTHONPATH": str(says)}
    ended = subprocess.run(
        [sys.executable, child.__file__, "says"], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert not {str(Path(child.__file__).parent), str(tmp_path)} & set(said(ended)[2])


def test_a_grandchild_imports_nothing_of_its_folder_either(says, tmp_path, monkeypatch):
    hostile = Hostile(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(says))
    start = f"subprocess.run([sys.executable, '-c', 'import json'], cwd={str(hostile.folder)!r}, check=True)"
    (says / "starts.py").write_text(f"import subprocess, sys\n{start}")
    ended = child.run_module("starts")
    assert (ended.returncode, hostile.ran) == (0, []), ended.stderr


def test_a_child_reads_nothing_and_may_print_any_bytes(says, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(says))
    (says / "bytes.py").write_text("import sys\nsys.stdout.buffer.write(b'\\xff' + sys.stdin.buffer.read())")
    typed, terminal = os.pipe()
    ours = os.dup(0)
    try:
        os.dup2(typed, 0)
        os.write(terminal, b"typed\n")
        os.close(terminal)
        assert child.run_module("bytes").stdout == "\ufffd"
    finally:
        os.dup2(ours, 0)
        for number in (typed, ours):
            os.close(number)

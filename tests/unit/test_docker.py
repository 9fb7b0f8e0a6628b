"""The image: its context is what the wheel is built from, its base the SGLang that this project is tested with."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import yaml
from builders.wheels import ROOT, build_wheel, tracked
from packaging.requirements import Requirement

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

RULES = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def matches(pattern: str, path: str) -> bool:
    """As Docker matches: ``**`` stands for any folders, ``*`` for a part of one name, and a folder for all that is in it."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.strip("/"))
    special = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = "".join(special.get(part, re.escape(part)) for part in parts)
    return any(re.fullmatch(expression, str(each)) for each in (PurePosixPath(path), *PurePosixPath(path).parents))


def in_context(path: str, rules: list[str] = RULES) -> bool:
    """The last rule that matches decides."""
    last = [rule for rule in rules if matches(rule.removeprefix("!"), path)][-1:]
    return last == [] or last[0].startswith("!")


@pytest.mark.parametrize(
    ("rules", "path", "inside"),
    [
        (["*"], "a/b/c", False),
        (["*", "!a"], "a/b/c", True),
        (["*", "!a", "a/b"], "a/b/c", False),
        (["*.py"], "a/b.py", True),
        (["**/*.py"], "a/b.py", False),
        (["**/*.py"], "b.py", False),
        (["a/**/c"], "a/c", False),
        (["a?"], "ab/c", False),
        (["/a"], "a", False),
        (["a"], "b/a", True),
    ],
)
def test_rules_are_read_as_docker_reads_them(rules, path, inside):
    """By the documentation of ``.dockerignore``."""
    assert in_context(path, rules) == inside


@pytest.mark.parametrize(
    "path",
    [
        ".git/config",
        ".venv/bin/python",
        ".venv-unit/lib/python3.12/site-packages/torch/lib/libtorch.so",
        "benchmarks/results/start/start.json",
        "build/lib/sglang_uvm_offload/__init__.py",
        "dist/sglang_uvm_offload-0.1.0.tar.gz",
        "sglang_uvm_offload/__pycache__/config.cpython-312.pyc",
        "sglang_uvm_offload/plan/__pycache__/case.cpython-312.pyc",
        "sglang_uvm_offload.egg-info/PKG-INFO",
        "tests/conftest.py",
    ],
)
def test_what_the_image_does_not_need_stays_out_of_the_context(path):
    assert not in_context(path)


@pytest.mark.slow
def test_the_context_makes_the_same_wheel_as_the_checkout(wheel, tmp_path):
    from_context = build_wheel(tmp_path, filter(in_context, tracked()))
    names = [sorted(zipfile.ZipFile(each).namelist()) for each in (wheel, from_context)]
    assert names[0] == names[1]


def test_the_context_holds_nothing_else():
    used = {"LICENSE", "README.md", "pyproject.toml", "sglang_uvm_offload", "kernels"}
    assert {Path(name).parts[0] for name in filter(in_context, tracked())} == used


def test_the_base_is_the_sglang_that_the_project_is_tested_with():
    (version,) = re.findall(r"^FROM lmsysorg/sglang:v(\S+)$", DOCKERFILE, re.M)
    (tested,) = re.findall(r"^With SGLang ([\d.]+),", (ROOT / "docs/support.md").read_text(), re.M)
    assert version == tested


@pytest.mark.sglang
def test_sglang_brings_all_that_the_plugin_needs():
    """pip installs the plugin without dependencies, lest it replaces packages of the image."""
    assert "--no-deps" in DOCKERFILE
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = itertools.chain(importlib.metadata.requires("sglang"), ["sglang"])
    assert {Requirement(each).name for each in needed} <= {Requirement(each).name for each in names}


def test_compose_builds_this_image():
    folder = ROOT / "docs/operations"
    build = yaml.safe_load((folder / "compose.yaml").read_text())["services"]["sglang"]["build"]
    assert (folder / build["context"]).resolve() == ROOT
    assert (folder / build["context"] / build["dockerfile"]).is_file()

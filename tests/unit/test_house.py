"""The layering, and documents that are generated: the code's own promises about itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import sglang_uvm_offload
from sglang_uvm_offload import plugin
from sglang_uvm_offload.flags import tables

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_uvm_offload"


def modules() -> dict[str, Path]:
    """Every file by its dotted name; a folder stands for its ``__init__``, and ``""`` for the package's own."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
        for path in PACKAGE.rglob("*.py")
    }


def imports(path: Path) -> set[str]:
    """The full names that a file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def graph() -> dict[str, set[str]]:
    """Which file imports which."""
    files = modules()
    edges: dict[str, set[str]] = {}
    for name, path in files.items():
        inside = {full.removeprefix("sglang_uvm_offload.") for full in imports(path) if full.startswith("sglang_uvm_offload.")}
        # ``package.file`` itself, or a name that ``package.file`` (or the package's __init__) holds.
        edges[name] = {full if full in files else full.rpartition(".")[0] for full in inside} - {name}
        assert edges[name] <= set(files), f"{name} imports {sorted(edges[name] - set(files))}, which do not exist"
    return edges


def package(name: str) -> str:
    """The folder that a file is in, ``""`` for the package's own."""
    return name.split(".")[0] if "." in name or (PACKAGE / name).is_dir() else ""


def room(name: str) -> str:
    """The folder of ``plugin`` that one of its files is in, or the file's own name; ``""`` for ``plugin/__init__``."""
    return name.split(".")[1] if "." in name else ""


def listed(docstring: str | None) -> dict[str, int]:
    """The rank of each name that a docstring lists."""
    lines = re.findall(r"^    (\d)  ([\w ]+)$", docstring or "", flags=re.M)
    return {name: int(rank) for rank, names in lines for name in names.split()}


def ranks() -> dict[str, int]:
    """The rank of each folder, and of the package's own files."""
    return {"": 1} | listed(sglang_uvm_offload.__doc__)


def test_the_listed_packages_are_the_ones_there_are():
    assert set(ranks()) == {package(name) for name in modules()}


@pytest.mark.slow
def test_a_file_imports_from_its_own_folder_or_one_of_lower_rank():
    rank = ranks()
    upward = [
        f"{name} -> {target}"
        for name, targets in graph().items()
        for target in targets
        if package(target) != package(name) and rank[package(target)] >= rank[package(name)]
    ]
    assert not upward


@pytest.mark.slow
def test_a_file_of_the_plugin_imports_from_its_own_room_or_one_of_lower_rank():
    """The files of ``plugin`` itself that have one rank are one room; its ``__init__``, which registers all, comes last."""
    rank, edges = listed(plugin.__doc__), graph()
    rank[""] = max(rank.values()) + 1
    inside = {name for name in edges if package(name) == "plugin"}
    folders = {path.name for path in (PACKAGE / "plugin").iterdir() if path.is_dir()}
    assert set(rank) == {room(name) for name in inside}
    upward = [
        f"{name} -> {target}"
        for name in inside
        for target in edges[name] & inside
        if (rank[room(target)], room(target) in folders) > (rank[room(name)], False) and room(target) != room(name)
    ]
    assert not upward


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle():
    edges, done = graph(), set()
    while ready := [name for name in edges if name not in done and edges[name] <= done]:
        done |= set(ready)
    assert set(edges) == done, f"in a circle: {sorted(set(edges) - done)}"


@pytest.mark.slow
def test_only_the_plugin_imports_sglang():
    files = modules().items()
    assert {package(name) for name, path in files if "sglang" in {full.split(".")[0] for full in imports(path)}} == {"plugin"}


def test_the_policy_imports_numpy_alone():
    files = [path for name, path in modules().items() if package(name) == "policy"]
    found = {full.removeprefix("sglang_uvm_offload.").split(".")[0] for path in files for full in imports(path)}
    assert found <= {"numpy", "policy", "__future__", "dataclasses", "itertools", "typing", "collections", "math"}


@pytest.mark.slow
def test_only_the_edges_choose_a_device():
    choosing = {
        package(name) for name, targets in graph().items() for target in targets if package(target) in ("cuda", "cpu")
    } - {"cuda", "cpu"}
    assert choosing <= {"plugin", "replay", "cli"}


def test_one_file_starts_processes():
    """So that none of them imports from the current folder."""
    starts = re.compile(
        r"\b(subprocess\.(run|Popen|call|check_\w+)|os\.(system|popen|exec\w+|(posix_)?spawn\w*)|sys\.executable)\b"
    )
    assert [name for name, path in modules().items() if starts.search(path.read_text())] == ["files.child"]


def test_commands_print_by_one_door():
    """It drops the control characters of what servers, checkpoints and files say."""
    printing = {
        name
        for name, path in modules().items()
        if package(name) == "cli"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert printing == {"cli.terminal", "cli.replay"}, "replay: the progress line"


def test_every_package_says_in_one_sentence_what_it_is_for():
    for name, path in modules().items():
        if path.name == "__init__.py" and name:
            summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
            assert summary.endswith("."), name


def test_every_file_of_the_paths_exists():
    files = set(modules())
    named = re.findall(r"\b([a-z]+(?:/[a-z_]+)+)\b", sglang_uvm_offload.__doc__)
    assert named
    assert {name.replace("/", ".") for name in named} <= files


def test_the_design_is_short_and_the_code_that_it_names_exists():
    """Figures and their history are in GPU_STATUS.md and docs/benchmarks.md."""
    page = (ROOT / "expert_offload_plan.md").read_text()
    assert len(page.split()) <= 3000
    named = re.findall(r"`([a-z]+(?:/[a-z_]+)+)/?`", page)
    assert named
    assert [name for name in named if not (PACKAGE / name).is_dir() and name.replace("/", ".") not in modules()] == []


def test_registering_imports_nothing_before_it_is_called():
    assert imports(PACKAGE / "plugin" / "__init__.py") == {
        "__future__.annotations",
        "sglang_uvm_offload.plugin.enforce",
        "sglang_uvm_offload.plugin.hooks",
        "sglang_uvm_offload.plugin.roles",
        "sglang_uvm_offload.plugin.server_args",
    }
    top = ast.parse((PACKAGE / "plugin" / "__init__.py").read_text()).body
    assert [node.module for node in top if isinstance(node, ast.ImportFrom)] == ["__future__"]


def test_the_page_shows_the_flags_as_the_config_has_them():
    page = (ROOT / "docs/flags.md").read_text()
    for name, table in tables().items():
        assert page.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0] == table


@pytest.mark.slow
def test_no_test_imports_another_test_file():
    found = {
        f"{path.name} imports {full}"
        for path in (ROOT / "tests").rglob("*.py")
        for full in imports(path)
        if full.split(".")[0].startswith("test_")
    }
    assert not found


@pytest.mark.slow
def test_scripts_and_benchmarks_take_nothing_from_the_tests():
    """Neither a module that lies in ``tests``, nor that folder in ``sys.path`` or a command."""
    of_tests = {"tests"} | {path.stem for path in (ROOT / "tests").iterdir() if path.suffix == ".py" or path.is_dir()}
    for path in [*(ROOT / "scripts").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        imported = {full.split(".")[0] for full in imports(path)}
        assert not imported & of_tests, f"{path.relative_to(ROOT)} imports {sorted(imported & of_tests)}"
        strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        named = [text for text in strings if isinstance(text, str) and re.search(r"(^|/)tests(/|$)", text)]
        assert not named, f"{path.relative_to(ROOT)} names {named}"


@pytest.mark.slow
def test_unit_tests_start_no_engine_and_compile_nothing():
    """Neither by a fixture that does, nor by a helper."""
    needing = {"engines", "standin", "sglang", "sglang_on_standin"}
    for path in (ROOT / "tests" / "unit").glob("*.py"):
        arguments = {node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg)}
        assert not arguments & needing, path.name
        helpers = {full for full in imports(path) if full.split(".")[0] in ("serving", "standin", "nursery", "launches")}
        assert not helpers | ({"scripts.harness.server.Server"} & imports(path)), path.name

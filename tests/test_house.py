"""The layering, and documents that are generated: the code's own promises about itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import sglang_uvm_offload
from sglang_uvm_offload.config import flag_table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sglang_uvm_offload"


def module_name(path: Path) -> str:
    """``layout``, or ``plugin`` for every file of that package: seen from outside it is one module."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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
    """Which module imports which, for everything but the package's ``__init__``."""
    edges: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "__init__.py":
            continue
        own = edges.setdefault(module_name(path), set())
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "sglang_uvm_offload" and len(parts) > 1 and parts[1] != "__version__":
                own.add(parts[1])
    return {name: targets - {name} for name, targets in edges.items()}


def test_only_the_plugin_imports_sglang():
    importers = {
        module_name(path) for path in PACKAGE.rglob("*.py") if any(name.split(".")[0] == "sglang" for name in imports(path))
    }
    assert importers == {"plugin"}


def test_imports_point_one_way():
    edges, done = graph(), set()
    while ready := [name for name in edges if name not in done and edges[name] <= done]:
        done |= set(ready)
    assert set(edges) == done, f"in a circle: {sorted(set(edges) - done)}"


def test_the_package_lists_its_modules_in_dependency_order():
    listed = re.findall(r"^    (\w+) {2,}\S", sglang_uvm_offload.__doc__, flags=re.M)
    edges = graph()
    assert sorted(listed) == sorted(edges)
    for index, name in enumerate(listed):
        late = edges[name] & set(listed[index + 1 :])
        assert not late, f"{name} imports {late}, listed after it"


def test_registering_imports_nothing_before_it_is_called():
    assert imports(PACKAGE / "plugin" / "__init__.py") == {
        "__future__.annotations",
        "sglang_uvm_offload.plugin.demand",
        "sglang_uvm_offload.plugin.hooks",
        "sglang_uvm_offload.plugin.server_args",
    }
    top = ast.parse((PACKAGE / "plugin" / "__init__.py").read_text()).body
    assert [node.module for node in top if isinstance(node, ast.ImportFrom)] == ["__future__"]


def test_the_readme_shows_the_flags_as_the_config_has_them():
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("<!-- flags -->\n")[1].split("\n<!-- /flags -->")[0]
    assert shown == flag_table()


def test_every_script_that_a_document_names_exists():
    for document in ROOT.glob("*.md"):
        for script in re.findall(r"scripts/[\w.]+\.(?:sh|py)", document.read_text()):
            assert (ROOT / script).exists(), f"{document.name} names {script}"

"""What SGLang's models reach, by the syntax trees of its files: importing them takes seconds and runs much else.

A definition *reaches* all names that it uses, and what those use in turn. Followed are SGLang's models and its layers but for
those in ``LEAVES``, which models share: of these only the names are noted. Which branch is taken is not known, so a model
reaches more than it uses in any one launch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLLOWED = ("sglang.srt.models", "sglang.srt.layers")
LEAVES = tuple(f"sglang.srt.layers.{name}" for name in ("moe", "quantization", "attention"))

FOUND = Path(__file__).with_name("found.json")
"""What became of all this for the SGLang that is pinned: ``python -m architectures.registry`` in ``tests`` writes it."""

Name = tuple[str, str]
"""A module, and what it defines."""

FUSED_MOE = re.compile(r"FusedMoE|get_moe_impl_class")
EXPERT_KERNEL = re.compile(r"(invoke_)?fused_(moe|experts).*|.*gem[mv](_triton)?")
"""Functions that take the weights of experts. Those of SGLang that only route have other names."""
EXPERT_COUNT = re.compile(r"(n_routed|moe_num|num|num_local)_experts")


class Module:
    """A file of SGLang: what it defines at its top level, and where the other names that it uses are from."""

    def __init__(self, name: str, path: Path):
        self.defined: dict[str, list[ast.AST]] = {}
        self.imported: dict[str, list[Name]] = {}
        tree = ast.parse(path.read_text(encoding="utf-8"))
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, *filter(None, [node.module])])
                for alias in node.names:
                    self.imported.setdefault(alias.asname or alias.name, []).append((source, alias.name))
        for name, node in _definitions(tree.body):
            self.defined.setdefault(name, []).append(node)

    @cache  # noqa: B019 -- modules live as long as the process
    def names(self, name: str) -> tuple[set[str], set[str]]:
        """The names and the attributes that the definition uses."""
        nodes = [node for defined in self.defined[name] for node in ast.walk(defined)]
        attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return {node.id for node in nodes if isinstance(node, ast.Name)}, attributes


def _definitions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Classes, functions and constants, also those under conditions."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node.value) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id, node.value
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _definitions([*node.body, *node.orelse])


@cache
def module(name: str) -> Module | None:
    """None for what is not followed."""
    if not name.startswith(FOLLOWED) or name.startswith(LEAVES):
        return None
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]).joinpath(*name.split(".")[1:])
    found = (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists())
    return next((Module(name, file) for file in found), None)


@cache
def used_by(name: Name) -> frozenset[Name]:
    """What the definition ``name`` uses; of names that are only imported, what they stand for."""
    source = module(name[0])
    if source is None:
        return frozenset()
    if name[1] in source.defined:
        own, _ = source.names(name[1])
        return frozenset((name[0], used) for used in own if used in source.defined or used in source.imported)
    return frozenset(source.imported.get(name[1], ()))


def reached(name: Name) -> set[Name]:
    seen: set[Name] = set()
    todo = [name]
    while todo:
        if (at := todo.pop()) not in seen:
            seen.add(at)
            todo += used_by(at)
    return seen


class Architecture:
    """One that SGLang registers."""

    def __init__(self, name: Name):
        self.name = name[1]
        self.reached = reached(name)
        moe = {used for source, used in self.reached if ".moe" in source}
        self.fused_moe = any(map(FUSED_MOE.fullmatch, moe))
        """Whether SGLang's ``FusedMoE`` is among what it may build."""
        self.kernels = sorted(filter(EXPERT_KERNEL.fullmatch, moe))
        """The kernels of experts that it may call itself."""

    @property
    def counts_experts(self) -> bool:
        """Whether it reads a number of experts from anything."""
        files = ((module(source), used) for source, used in self.reached)
        read = (file.names(used)[1] for file, used in files if file is not None and used in file.defined)
        return any(EXPERT_COUNT.fullmatch(attribute) for attributes in read for attribute in attributes)


@cache
def architectures() -> dict[str, Architecture]:
    """By name."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    names = [f"sglang.srt.models.{file.stem}" for file in sorted(folder.glob("*.py"))]
    files = {name: found for name in names if (found := module(name)) is not None}
    entries = [
        (name, used) for name, file in files.items() if "EntryClass" in file.defined for used in file.names("EntryClass")[0]
    ]
    return {used: Architecture((name, used)) for name, used in entries}


def found() -> dict[str, Any]:
    """As ``found.json`` has it."""
    known = architectures().values()
    return {
        "FusedMoE": sorted(each.name for each in known if each.fused_moe),
        "kernels": {each.name: each.kernels for each in sorted(known, key=lambda each: each.name) if each.kernels},
        "other": sorted(each.name for each in known if not each.fused_moe and not each.kernels and each.counts_experts),
    }


if __name__ == "__main__":
    FOUND.write_text(json.dumps(found(), indent=1) + "\n")

"""Rebinds names that modules imported with ``from sglang.x import f`` after ``f`` is hooked.

SGLang's registry scans all modules for each hook, which are thousands in a rank. Here one scan serves all hooks of this plugin.
SGLang handles those of other plugins.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from inspect import signature
from types import ModuleType
from typing import Any

from sglang.srt.plugins import hook_registry

_REBINDS = "_propagate_patch"


@contextmanager
def searched_once(targets: Iterable[str]) -> Iterator[None]:
    """Inside the block, SGLang's registry rebinds names with one scan for all of the dotted ``targets``. A registry whose
    rebinding function has an unknown signature is left alone."""
    original = getattr(hook_registry, _REBINDS, None)
    if original is None or [*signature(original).parameters] != ["original", "wrapped", "source_module"]:
        yield
        return
    setattr(hook_registry, _REBINDS, _Search(targets, original).rebind)
    try:
        yield
    finally:
        setattr(hook_registry, _REBINDS, original)


class _Search:
    """The modules that hold the targets, and under which names. Scans again once another module is imported. ``otherwise``
    rebinds objects that are not in ``targets`` or were not imported before."""

    def __init__(self, targets: Iterable[str], otherwise: Callable[[object, object, object], int]):
        self._targets = tuple(targets)
        self._otherwise = otherwise
        self._search()

    def rebind(self, original: object, wrapped: object, source_module: object) -> int:
        """Replace ``original`` with ``wrapped`` in all modules but ``source_module``. Returns the number of rebound names."""
        if id(original) not in self._wanted:
            return self._otherwise(original, wrapped, source_module)
        if [*map(id, sys.modules.values())] != [*map(id, self._modules)]:
            self._search(original)
        rebound = 0
        for module, name in self._holders.get(id(original), ()):
            if module is not source_module and vars(module).get(name) is original:
                try:
                    setattr(module, name, wrapped)
                except (AttributeError, TypeError):  # a module may refuse, which SGLang's registry also ignores
                    continue
                rebound += 1
        return rebound

    def _search(self, *besides: object) -> None:
        self._wanted = {id(one): one for one in (*besides, *_originals(self._targets))}
        self._modules = [*sys.modules.values()]  # after the line above, which may import modules lazily
        self._holders: dict[int, list[tuple[ModuleType, str]]] = defaultdict(list)
        for module in self._modules:
            for name, value in _held(module):
                if id(value) in self._wanted:
                    self._holders[id(value)].append((module, name))


def _held(module: Any) -> list[tuple[str, object]]:
    """A module's names and their values; empty for an object in ``sys.modules`` that is not a module."""
    try:
        return [*vars(module).items()] if isinstance(module, ModuleType) else []
    except TypeError:  # SGLang's registry also skips such a module
        return []


def _originals(targets: Iterable[str]) -> Iterator[object]:
    """What the registry treats as the original of each target whose module is imported."""
    for target in targets:
        path, _, attribute = target.rpartition(".")
        owner = _resolved(path)
        held = vars(owner).get(attribute) if isinstance(owner, type) else None
        original = held.__func__ if isinstance(held, classmethod | staticmethod) else getattr(owner, attribute, None)
        if original is not None:
            yield original


def _resolved(path: str) -> Any:
    """The module or class at a dotted path; None if it does not exist or is not imported."""
    if path in sys.modules:
        return sys.modules[path]
    above, _, name = path.rpartition(".")
    return getattr(_resolved(above), name, None) if above else None

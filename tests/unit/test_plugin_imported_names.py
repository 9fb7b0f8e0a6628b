"""One search for all hooks rebinds what SGLang's registry rebinds by a search for each."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_uvm_offload.plugin.imported_names import searched_once

pytestmark = pytest.mark.sglang

SOURCE = """
def first(): return "first"
def second(): return "second"
again = second
class Owner:
    def method(self): return "method"
    @classmethod
    def of_class(cls): return "of class"
    @staticmethod
    def of_none(): return "of none"
"""
IMPORTS = """
from imported_names_source import *
from imported_names_source import second as other
method, of_class, of_none = Owner.method, vars(Owner)["of_class"].__func__, Owner.of_none
"""
TARGETS = ("first", "second", "Owner.method", "Owner.of_class", "Owner.of_none")


class Refuses(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class ShowsNothing(ModuleType):
    @property
    def __dict__(self):
        raise TypeError("no names")


def module(name: str, code: str, kind: type[ModuleType] = ModuleType) -> ModuleType:
    made = sys.modules[name] = kind(name)
    exec(code, vars(made))
    return made


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        del sys.modules[name]


def hooked(targets: list[str], code: str, once: bool, during: str = "") -> dict[str, list[str]]:
    """The names that hold a hook, by module, once hooks are on ``targets``. ``during``: what is imported meanwhile."""
    modules = [module("imported_names_source", SOURCE), module("imported_names_user", code)]
    modules.append(module("imported_names_refusing", code, Refuses))
    sys.modules["imported_names_hidden"] = ShowsNothing("imported_names_hidden")
    for target in targets:
        HookRegistry.register(target, lambda original, *args: f"hooked {original(*args)}", HookType.AROUND)
    apply = HookRegistry._apply_target

    def applied(target: str, hooks: list) -> None:
        if during and target.endswith("second"):
            modules.append(module("imported_names_late", during))
        apply(target, hooks)

    with searched_once(targets) if once else nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(HookRegistry, "_apply_target", applied)
        HookRegistry.apply_hooks()
    return {
        each.__name__: sorted(name for name, value in vars(each).items() if hasattr(value, "__wrapped__")) for each in modules
    }


@pytest.mark.parametrize(
    ("targets", "during"),
    [
        pytest.param([f"imported_names_source.{name}" for name in TARGETS], "", id="all"),
        pytest.param([f"imported_names_source.{name}" for name in TARGETS], IMPORTS, id="imported meanwhile"),
        pytest.param(["imported_names_source.first", "imported_names_user.first"], "", id="hooked where it is imported too"),
        pytest.param(["no_such_module.f", "imported_names_user.other"], "", id="one module is missing"),
    ],
)
def test_the_same_names_are_rebound(registry, monkeypatch, targets, during):
    expected = hooked(targets, IMPORTS, once=False, during=during)
    assert expected["imported_names_user"], "a name that was imported is hooked"
    assert expected["imported_names_refusing"] == []
    HookRegistry.reset()
    assert hooked(targets, IMPORTS, once=True, during=during) == expected


def test_modules_are_searched_once_for_all(registry, monkeypatch):
    searches = []

    class Counted(ModuleType):
        @property
        def __dict__(self):
            searches.append(self)
            return {}

    sys.modules["imported_names_counted"] = Counted("imported_names_counted")
    hooked([f"imported_names_source.{name}" for name in TARGETS], IMPORTS, once=True)
    assert len(searches) == 1


def test_hooks_of_other_plugins_are_left_to_sglang(registry, monkeypatch):
    left, theirs = [], hook_registry._propagate_patch

    def seen(original: object, wrapped: object, source_module: object) -> int:
        left.append(original)
        return theirs(original, wrapped, source_module)

    monkeypatch.setattr(hook_registry, "_propagate_patch", seen)
    source = module("imported_names_source", SOURCE)
    first, second = vars(source)["first"], vars(source)["second"]
    user = module("imported_names_user", IMPORTS)
    for name in ("first", "second"):
        HookRegistry.register(f"imported_names_source.{name}", lambda original: original(), HookType.AROUND)
    with searched_once(["imported_names_source.first"]):
        HookRegistry.apply_hooks()
    assert left == [second]
    assert user.first is source.first is not first
    assert user.second is source.second is not second


def test_another_registry_is_left_alone(monkeypatch):
    def other(original: object, wrapped: object) -> int:
        return 0

    monkeypatch.setattr(hook_registry, "_propagate_patch", other)
    with searched_once(["imported_names_source.first"]):
        assert hook_registry._propagate_patch is other

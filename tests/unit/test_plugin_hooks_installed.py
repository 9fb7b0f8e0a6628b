"""Hooks in one process: once each, and around those of other plugins."""

from types import SimpleNamespace

import pytest
from builders.configs import served_config
from builders.launch import arguments
from sglang.srt import runtime_context
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_uvm_offload.plugin import hooks, roles
from sglang_uvm_offload.plugin.operate import end_of_serving, http_routes, replicas, shared_signals
from sglang_uvm_offload.plugin.rank import scheduler_hooks

pytestmark = pytest.mark.sglang


class Counted:
    def count(self):
        return ["own"]


TARGET = f"{__name__}.Counted.count"


@pytest.fixture
def registry(monkeypatch):
    for owner, name, empty in ((HookRegistry, "_hooks", None), (HookRegistry, "_patched", set()), (hooks, "_targets", [])):
        monkeypatch.setattr(owner, name, type(HookRegistry._hooks)(list) if empty is None else empty)
    monkeypatch.setattr(Counted, "count", Counted.count)


def saying(word):
    return lambda original, *args: [word, *original(*args)]


def test_a_hook_goes_around_those_that_are_in_place(registry):
    HookRegistry.register(TARGET, saying("another's"), HookType.AROUND)
    HookRegistry.apply_hooks()
    hooks.add(TARGET, saying("ours"), HookType.AROUND)
    HookRegistry.apply_hooks()
    assert Counted().count() == ["ours", "another's", "own"]


@pytest.mark.parametrize("flag", ["save_profile", "trace", "stats", None])
def test_only_a_server_that_saves_files_saves_them_at_its_end(monkeypatch, flag):
    installed = []
    config = served_config(num_resident=1, **({flag: "file"} if flag else {}))
    monkeypatch.setattr(roles, "config_of", lambda args: config)
    monkeypatch.setattr(roles, "_installed", set())
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.setattr(http_routes, "add_where_served", lambda: None)
    monkeypatch.setattr(end_of_serving, "install", lambda add: installed.append("hooks"))
    monkeypatch.setattr(replicas, "install", lambda add: None)
    monkeypatch.setattr(shared_signals, "outlive", lambda: installed.append("signals"))
    for role in ("tokenizer", "dp_controller"):
        roles._after_publish(None, arguments(), role=role)
    assert installed == (["hooks", "signals"] if flag else [])


def test_arguments_that_are_published_twice_install_hooks_once(monkeypatch):
    installed = []
    features, graph = SimpleNamespace(enable_memory_saver=False), SimpleNamespace(enable_torch_compile=True)
    monkeypatch.setattr(roles, "config_of", lambda args: "config")
    monkeypatch.setattr(roles, "_installed", set())
    monkeypatch.setattr(hooks, "missing", lambda: None)
    monkeypatch.setattr(HookRegistry, "apply_hooks", lambda: None)
    monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(features=features, graph=graph))
    monkeypatch.setattr(runtime_context, "get_lora", lambda: SimpleNamespace(enable_lora=False))
    monkeypatch.setattr(scheduler_hooks, "install", lambda *args, **kwargs: installed.append(kwargs))
    for _ in range(2):
        roles._after_publish(None, arguments(), role="scheduler")
    assert installed == [{"adapters": False, "memory_saver": False, "compiled": True}]

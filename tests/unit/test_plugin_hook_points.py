"""Another SGLang than those that were tried starts with offloading only where every hook point is in place."""

from __future__ import annotations

import ast
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sglang
from builders.configs import served_config
from sglang.srt import plugins
from sglang.srt.arg_groups import overrides
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin import enforce, hook_points, roles, server_args, since, weight_writes
from sglang_uvm_offload.plugin.operate import end_of_serving, replicas
from sglang_uvm_offload.plugin.rank import scheduler_hooks

pytestmark = pytest.mark.sglang

PLUGIN = Path(hook_points.__file__).parent
ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "benchmarks" / "results" / "support"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "__version__", "0.9.0")
    monkeypatch.setattr(plugins, "_plugins_loaded", True)  # these tests load none


def parsed() -> Iterator[tuple[str, ast.Module]]:
    """The plugin's files, but for those that a launch does without: a program that builds models for ``plan``, which says where
    a name has moved."""
    for path in PLUGIN.rglob("*.py"):
        name = str(path.relative_to(PLUGIN))
        if path.parent.name != "meta":
            yield name, ast.parse(path.read_text())


def listed() -> set[str]:
    attributes = {f"{owner}.{name}" for owner, names in hook_points.ATTRIBUTES.items() for name in names.split()}
    return {*hook_points.HOOKED, *hook_points.CALLED, *hook_points.ATTRIBUTES, *attributes, *weight_writes.WRITERS}


def test_every_function_that_is_hooked_is_listed():
    targets: set[str] = set()
    for tma in ("on", "off"):
        every = {
            "slots": "1",
            "draft_num_resident": 1,
            "trace": "/nowhere.npz",
            "lookup_tables": "host",
        }
        config = served_config(num_resident="1", **every, tma=tma)
        scheduler_hooks.install(config, lambda target, hook, kind: targets.add(target))
    for others in (end_of_serving, replicas):
        others.install(lambda target, hook, kind: targets.add(target))
    assert targets | {roles._PUBLISH} == {*hook_points.HOOKED, *weight_writes.WRITERS}


def test_every_name_that_is_imported_from_sglang_is_listed():
    imported = {
        f"{node.module}.{alias.name}"
        for _, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.")
        for alias in node.names
    }
    below = {name for full in listed() for name in (full, full.rpartition(".")[0])}
    # An instance, whose class is listed.
    assert imported - below - {"sglang.srt.environ.envs"} == set()


def test_every_argument_of_sglangs_that_is_read_is_listed():
    read = {
        (node.attr, name)
        for name, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("cfg", "given", "self.cfg")
    }
    fields = set(hook_points.ATTRIBUTES["sglang.srt.server_args.ServerArgs"].split())
    assert {pair for pair in read if pair[0] not in fields} <= {("get", "slots/seam.py")}  # a dict's


def test_this_sglang_has_all_of_it():
    assert hook_points.moved() == []


def test_another_version_with_all_of_it_is_served_with_one_warning(untried, caplog):
    hook_points.check()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "untested with SGLang 0.9.0 (tested: " in record.message
    assert hook_points.TRIED[-1] in record.message


def test_each_version_that_counts_as_tried_has_passed_on_record_and_is_named():
    older = {entry["sglang"]: entry for entry in json.loads((SUPPORT / "versions.json").read_text())}
    newest = {row["sglang"] for row in json.loads((SUPPORT / "support.json").read_text())["rows"]}
    assert {*older, *newest} == {*hook_points.TRIED}
    assert [(entry["failed"], entry["ran"]) for entry in older.values()] == [(0, ["tests/engine"])] * len(older)
    (line,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| Python, SGLang |"))
    assert [version for version in hook_points.TRIED if version not in line] == []


def without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelRunner, "forward")


def with_another_parameter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "forward", lambda self, mode, forward_batch: None)


@pytest.mark.parametrize(
    ("doctor", "named"),
    [
        (without_it, f"{FORWARD} does not exist"),
        (with_another_parameter_first, f"{FORWARD}(self, mode, forward_batch) does not take (self, forward_batch)"),
    ],
)
def test_another_version_that_moved_a_hook_point_is_refused_by_its_name(doctor, named, untried, monkeypatch):
    doctor(monkeypatch)
    monkeypatch.delattr(Scheduler, "on_idle")  # and all are named at once
    with pytest.raises(FlagError) as refused:
        hook_points.check()
    first, *others = refused.value.problems
    assert "SGLang 0.9.0" in first
    assert ", ".join(hook_points.TRIED) in first
    assert sorted(others) == sorted([named, "sglang.srt.managers.scheduler.Scheduler.on_idle does not exist"])


def needs_more(server_args: Any, reason: str) -> None: ...


def knows_another_name(*, multimodal: bool, mm_feature_transport: str) -> None: ...


@pytest.mark.parametrize(
    ("target", "function"),
    [
        ("sglang.srt.arg_groups.overrides.post_capture_kv_sizing_planned", needs_more),
        ("sglang.srt.mem_cache.kv_cache_configurator.mm_runtime_reservation_gb", knows_another_name),
    ],
)
def test_a_function_that_is_called_must_take_what_it_is_given(target, function, monkeypatch):
    monkeypatch.setattr(target, function)
    assert [problem.partition("(")[0] for problem in hook_points.moved()] == [target]


class Layer:
    def __init__(self):
        self.rows = 1


def test_what_a_function_sets_is_seen_through_another_plugins_hook(monkeypatch):
    original = Layer.__init__
    monkeypatch.setattr(Layer, "__init__", functools.wraps(original)(lambda layer: original(layer)))
    monkeypatch.setattr(hook_points, "ATTRIBUTES", {f"{__name__}.Layer": "rows columns"})
    assert hook_points.moved() == [f"{__name__}.Layer.columns does not exist"]


def test_an_older_version_may_lack_what_is_done_without(monkeypatch):
    gone = "sglang.srt.layers.quantization.base_config.FusedMoEMethodBase.get_moe_runner_backend"
    monkeypatch.delattr(gone)
    assert hook_points.moved() == [f"{gone} does not exist"]
    monkeypatch.setattr(hook_points, "VERSION", (0, 5, 22))
    assert hook_points.moved() == []


def test_what_is_done_without_is_a_hook_point():
    assert set(since.SINCE) <= listed()


def arguments(**given: Any) -> Any:
    return server_args.OffloadServerArgs(model_path="dummy", device="cpu", **given)


def test_a_launch_is_refused_before_sglang_resolves_its_arguments(untried, monkeypatch):
    monkeypatch.delattr(overrides, "post_capture_kv_sizing_planned")
    args = arguments(expert_offload_num_resident="4")
    with pytest.raises(FlagError, match=r"overrides\.post_capture_kv_sizing_planned does not exist"):
        args.resolve_once()
    assert not getattr(args, "_resolution_finished", False)


def registering_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """As with a version that moved what the flags need."""
    monkeypatch.delattr("sglang.srt.arg_groups.overrides.declare_resolution")
    return lambda: enforce.fail_to_register(ImportError("cannot import name 'declare_resolution'"))


def test_a_command_with_flags_ends_with_what_moved_where_they_cannot_be_added(untried, monkeypatch):
    register = registering_fails(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["sglang", "--expert-offload-num-resident", "4"])
    with pytest.raises(
        SystemExit, match=r"ImportError: cannot import name[^$]*tested: [^$]*overrides.declare_resolution does not exist"
    ):
        register()


def test_a_command_without_flags_goes_on_where_they_cannot_be_added(untried, monkeypatch, caplog):
    register = registering_fails(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["sglang", "--model-path", "some"])
    register()
    assert "SGLang serves as usual without its flags" in caplog.text

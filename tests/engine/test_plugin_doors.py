"""Every way into SGLang, with the plugin installed: without a flag each is as if it were not, with one it offloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from nursery import Nursery

N = "expert_offload_num_resident"
WITHOUT = {"SGLANG_PLUGINS": "none"}
"""The environment in which SGLang loads none."""


# ---- objects ----

MADE = """
import copy, hashlib, json, pickle
from pathlib import Path
import msgspec, dataclasses
from sglang.srt import server_args as module
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def arguments(**more):
    return module.ServerArgs(model_path={model!r}, device="cpu", **more)

def replaced(made, **values):
    return (msgspec.structs if isinstance(made, msgspec.Struct) else dataclasses).replace(made, **values)

def told(**facts):
    print("RESULT", json.dumps(facts))

own = (module.ServerArgs,)  # where SGLang rebinds no name
"""
PLAIN = """
before = arguments()
load_plugins()
after, parsed = arguments(), module.prepare_server_args(["--model-path", {model!r}, "--device", "cpu"])
made = [before, after, copy.copy(before), copy.deepcopy(after), replaced(before), replaced(after), parsed,
        *(pickle.loads(pickle.dumps(each)) for each in (before, after)), own[0](model_path={model!r}, device="cpu")]
HookRegistry.register(
    "sglang.srt.server_args.ServerArgs.url", lambda original, self, *port: "hooked " + original(self, *port), HookType.AROUND)
HookRegistry.register(
    "sglang.srt.server_args.ServerArgs.from_cli_args", lambda made, *_: setattr(made, "_seen", 1), HookType.AFTER)
HookRegistry.apply_hooks()
Path({pickled!r}).write_bytes(pickle.dumps(before))
facts = dict(
    classes=[type(each) is own[0] for each in made], shown=[repr(each) == repr(before) for each in made],
    isinstance=[isinstance(each, kind) for each in made for kind in (own[0], module.ServerArgs)],
    issubclass=issubclass(own[0], module.ServerArgs), name=repr(module.ServerArgs),
    equal=[each == before for each in made], pickled=hashlib.sha256(pickle.dumps(before)).hexdigest(),
    as_well=pickle.dumps(after) == pickle.dumps(before), hooked=[before.url(), after.url()],
    seen=module.prepare_server_args(["--model-path", {model!r}, "--device", "cpu"])._seen,
)
for each in made:
    if hasattr(each, "resolve_once"):
        each.resolve_once()
dicts = [each.resolved_dict() if hasattr(each, "resolved_dict") else dict(vars(each)) for each in made]
for each in dicts:
    each.pop("random_seed", None)
facts.update(resolved=[sorted(map(repr, each.items())) == sorted(map(repr, dicts[0].items())) for each in dicts],
             fields=sorted(dicts[0]), beside=sorted(vars(before)))
told(**facts)
"""


def result(nursery: Nursery, program: str, **env: str) -> Any:
    ended = nursery.run(program, **env)
    assert ended.code == 0, ended.out + ended.err[-4000:]
    return json.loads(ended.out.rpartition("RESULT ")[2].splitlines()[0])


@pytest.fixture(scope="module")
def model(checkpoints: Checkpoints) -> str:
    return str(checkpoints("qwen3_moe"))


@pytest.fixture(scope="module")
def plain(model: str, sglang: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What arguments without a flag are, made before plugins are loaded and after, and a file with some."""
    pickled = tmp_path_factory.mktemp("plain") / "arguments"
    return {"file": pickled, **result(sglang, (MADE + PLAIN).format(model=model, pickled=str(pickled)))}


def test_without_a_flag_arguments_are_what_they_are_without_the_plugin(plain, model: str, sglang: Nursery, tmp_path: Path):
    """SGLang runs the same program without plugins: their class, pickles, copies, comparisons, resolution, others' hooks."""
    pickled = tmp_path / "arguments"
    assert result(sglang, (MADE + PLAIN).format(model=model, pickled=str(pickled)), **WITHOUT) == {
        name: value for name, value in plain.items() if name != "file"
    }
    assert all(plain["equal"])
    assert all(plain["classes"])
    assert plain["hooked"] == ["hooked http://127.0.0.1:30000"] * 2
    assert not [name for name in plain["beside"] if "expert_offload" in name]


READ = """
before = arguments()
{load}
read = pickle.loads(Path({pickled!r}).read_bytes())
told(same=read == before == arguments(), own=type(read) is own[0],
     loaded="sglang_uvm_offload" in sys.modules)
"""


@pytest.mark.parametrize(("load", "env"), [("", {}), ("load_plugins()", WITHOUT), ("load_plugins()", {})])
def test_arguments_are_the_same_in_a_process_with_the_plugin_or_without(load, env, plain, model: str, sglang: Nursery):
    program = "import sys\n" + MADE + READ
    read = result(sglang, program.format(model=model, pickled=str(plain["file"]), load=load), **env)
    assert read["same"]
    assert read["own"]
    assert read["loaded"] == bool(load and not env)


GIVEN = """
import inspect, typing
older = arguments()
older.expert_offload_num_resident = 2
load_plugins()
given = arguments(expert_offload_num_resident=2, expert_offload_stats="s.json")
made = [given, copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given)), replaced(given),
        replaced(arguments(expert_offload_num_resident=2), expert_offload_stats="s.json")]
class Theirs(module.ServerArgs):
    pass
listed = msgspec.structs.fields if issubclass(module.ServerArgs, msgspec.Struct) else dataclasses.fields
told(
    equal=[each == given and each.expert_offload_stats == "s.json" for each in made] + [given != arguments()],
    isinstance=[isinstance(given, kind) for kind in (own[0], module.ServerArgs)],
    listed=[{n!r} in names for names in (
        [field.name for field in listed(module.ServerArgs)], inspect.signature(module.ServerArgs).parameters,
        typing.get_type_hints(module.ServerArgs), dir(module.ServerArgs))],
    # as trainers do: all fields of the class, or those that differ
    defaults=type(arguments(**{{f.name: f.default for f in listed(module.ServerArgs) if "expert_" in f.name}})) is own[0],
    theirs=[getattr(Theirs(model_path="m", expert_offload_num_resident=3), {n!r}), isinstance(given, Theirs)],
    older=(older.resolve_once(), pickle.loads(pickle.dumps(older))._expert_offload_config.num_resident)[1],
    kept=getattr(own[0].from_cli_args(module.argparse.Namespace(model_path="m", expert_offload_num_resident="3")), {n!r}),
)
"""


def test_a_flag_is_a_field_as_any_other_once_plugins_are_loaded(model: str, sglang: Nursery):
    given = result(sglang, (MADE + GIVEN).format(model=model, n=N))
    assert all(given["equal"]), given
    assert given["isinstance"] == [True, True]
    assert given["listed"] == [True] * 4
    assert given["defaults"]
    assert given["theirs"] == [3, False]
    assert given["kept"] == "3"
    assert given["older"] == 2

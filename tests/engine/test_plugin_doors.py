"""Every way into SGLang, with the plugin installed: without a flag each is as if it were not, with one it offloads."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from builders import pages
from checkpoints import Checkpoints
from nursery import Nursery
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.process import kill_group
from scripts.harness.server import CPU, flags, free_port
from sglang_uvm_offload.plugin.since import VERSION

ROOT = Path(__file__).parents[2]
DOORS = ROOT / "tests/builders/doors.py"
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
given = arguments(expert_offload_num_resident=2, expert_offload_adapt="continuous")
made = [given, copy.copy(given), copy.deepcopy(given), pickle.loads(pickle.dumps(given)), replaced(given),
        replaced(arguments(expert_offload_num_resident=2), expert_offload_adapt="continuous")]
class Theirs(module.ServerArgs):
    pass
listed = msgspec.structs.fields if issubclass(module.ServerArgs, msgspec.Struct) else dataclasses.fields
told(
    equal=[each == given and each.expert_offload_adapt == "continuous" for each in made] + [given != arguments()],
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


PUBLISHED = """
from sglang.srt import runtime_context
if {made_here}:
    load_plugins()
    args = arguments(expert_offload_num_resident=4)
    Path({file!r}).write_bytes(pickle.dumps(args))
else:
    args = pickle.loads(Path({file!r}).read_bytes())
ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
runtime_context.publish(args, role="scheduler", ranks=ranks)
from sglang.srt.model_executor.model_runner import ModelRunner
told(hooked=hasattr(ModelRunner.load_model, "__wrapped__"))
"""

CHILDREN = """
import multiprocessing
from sglang.srt import runtime_context
args, codes = pickle.loads(Path({file!r}).read_bytes()), []
for role in ("scheduler", "detokenizer"):
    ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
    given = dict(role=role, ranks=ranks) if role == "scheduler" else dict(role=role)
    child = multiprocessing.get_context("fork").Process(target=runtime_context.publish, args=(args,), kwargs=given)
    child.start()
    child.join()
    codes.append(child.exitcode)
told(codes=codes)
"""


def test_a_process_that_publishes_unresolved_arguments_offloads_or_ends(model: str, sglang: Nursery, tmp_path: Path):
    """As SGLang's tools do that build a model themselves. Where the arguments come from another process and plugins are not
    loaded, the hook on ``publish`` would come while that runs. Older versions load none in a detokenizer, which needs none."""
    program = (MADE + PUBLISHED).replace("{file!r}", repr(str(tmp_path / "arguments")))
    assert result(sglang, program.format(model=model, made_here=True))["hooked"]
    ended = sglang.run(program.format(model=model, made_here=False))
    assert ended.code == 1
    assert "this process published arguments before loading plugins; call load_plugins() first" in ended.err
    children = CHILDREN.replace("{file!r}", repr(str(tmp_path / "arguments")))
    assert result(sglang, (MADE + children).format(model=model))["codes"] == [1, int(VERSION >= (0, 5, 22))]


# ---- servers ----

ON = {N: 4}
VISITS: dict[str, list[Any]] = {
    "Engine": [["engine", "arguments first", {}]],
    "Engine, offloading": [["engine", "plugins first", ON]],
    "child": [["child", "SGLang loads them", {}], ["child", "plugins first", ON]],
    "launch_server": ["here"],
}
"""By program; ``Engine`` ends the processes of one. Not all of door x flag x order is here, for many are one: ``Engine`` and
``launch_server`` load plugins with the arguments in hand, just as a program that makes them first, and without a flag
arguments are the same object in each order (see above). The command line, YAML and keywords serve in the tests of HTTP and
of the engines; that flags arrive by each is in test_plugin_arguments."""


def served(engines: Engines, folder: Path, program: str, model: Path, **env: str) -> tuple[list[list[int]], str]:
    """What each visit of the program answers, and its log."""
    result, log = folder / "result.json", folder / "log.txt"
    values = {**CPU, "model_path": str(model), "port": free_port(), "log_level": "info"}
    words = [str(DOORS), str(result), json.dumps({"values": values, "visits": VISITS[program]})]
    job = engines.start(words, folder, {"TMPDIR": str(engines.scratch), "PYTHONPATH": str(ROOT), **env}, log)
    try:
        code = job.wait(patience(240))
    finally:
        kill_group(job.pid)
    said = log.read_text(errors="replace")
    assert code == 0, said[-4000:]
    return json.loads(result.read_text()), said


@pytest.fixture(scope="module")
def without(engines: Engines, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[int]:
    """What SGLang answers where it does not load this plugin."""
    answers, said = served(engines, tmp_path_factory.mktemp("without"), "launch_server", checkpoint, SGLANG_PLUGINS="cpu_shims")
    assert "Expert offload" not in said
    return answers[0]


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", dtype="float32")


@pytest.mark.parametrize("program", VISITS)
def test_each_door_answers_as_without_the_plugin(program: str, without, engines: Engines, checkpoint: Path, tmp_path: Path):
    answers, said = served(engines, tmp_path, program, checkpoint)
    assert answers == [without] * len(VISITS[program])
    assert ("Placing experts" in said) == any(visit[-1:] == [ON] for visit in VISITS[program])


# ---- tools ----


def sglangs_tools() -> list[str]:
    """SGLang's modules that are programs with the arguments of a launch, but for those that load plugins before they parse."""
    folder = Path(find_spec("sglang").origin).parent  # type: ignore[union-attr, arg-type]
    files = [*folder.glob("*.py"), *(folder / "benchmark").glob("*.py")]
    return sorted(
        ".".join(("sglang", *file.relative_to(folder).with_suffix("").parts))
        for file in files
        if "ServerArgs.add_cli_args(" in file.read_text()
    )


TOOLS = sglangs_tools()
RUN = """
import json, sys
from sglang_uvm_offload.cli.main import main
sys.exit(main(["run", *json.loads({words!r})]))
"""


SHOWN = [words[2:] for words in pages.of_kind("sglang-uvm-offload run")]


@pytest.mark.parametrize("words", [*SHOWN, *([tool, "--model-path", "m", f"--{N.replace('_', '-')}", "4"] for tool in TOOLS)])
def test_a_tool_of_sglangs_takes_the_flags(words: list[str], sglang: Nursery):
    ended = sglang.run(RUN.format(words=json.dumps([*words, "--expert-offload-adapt", "never"])))
    assert ended.code == 2
    assert "argument --expert-offload-adapt: invalid choice: 'never'" in ended.err


def test_the_page_names_every_tool():
    page = (ROOT / "docs/flags.md").read_text()
    assert [tool for tool in TOOLS if f"`{tool}`" not in page and f"`{tool.rpartition('.')[2]}`" not in page] == []


@pytest.mark.parametrize(
    ("words", "env", "reason"),
    [
        (["sglang.no_such"], {}, "there is no Python module sglang.no_such"),
        (["sglang.compile_deep_gemm"], WITHOUT, "SGLANG_PLUGINS excludes this plugin"),
    ],
)
def test_a_tool_that_cannot_take_them_is_refused(words: list[str], env: dict[str, str], reason: str, sglang: Nursery):
    ended = sglang.run(RUN.format(words=json.dumps(words)), **env)
    assert ended.code == 2
    assert ended.err.rpartition("sglang-uvm-offload run: error: ")[2].startswith(reason)
    assert "Traceback" not in ended.err


def test_a_tool_computes_the_same_with_offloading(engines: Engines, checkpoint: Path, tmp_path: Path):
    tool = ["sglang.benchmark.one_batch", "--correctness-test", "--batch-size", "1", "--output-len", "4"]
    arguments = [*tool, *flags({**CPU, "model_path": str(checkpoint)})]
    commands = {
        "off": ["-m", *arguments],
        "on": ["-m", "sglang_uvm_offload.cli.main", "run", *arguments, *flags(ON)],
    }
    said = {}
    for name, command in commands.items():
        log = tmp_path / name
        job = engines.start(command, tmp_path, {"TMPDIR": str(engines.scratch)}, log)
        try:
            assert job.wait(patience(240)) == 0, log.read_text(errors="replace")[-4000:]
        finally:
            kill_group(job.pid)
        said[name] = log.read_text(errors="replace")
    outputs = {name: re.findall(r"^=+ Prompt \d =+ *\n(.+)$", text, re.M) for name, text in said.items()}
    assert outputs["on"] == outputs["off"]
    assert len(outputs["on"]) == 3
    assert "Placing experts" in said["on"]

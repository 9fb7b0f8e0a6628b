"""A plugin that cannot do its work must not let a server start without it; one that is not asked for must not matter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders.plugins import IN_SCHEDULER, saboteur
from checkpoints import Checkpoints
from nursery import Nursery
from serving import PROMPTS, Engines

from scripts.harness.patience import patience
from scripts.harness.process import kill_group
from scripts.harness.server import CPU, environment, flags, offload_state

OFFLOAD = {"expert_offload_num_resident": 4}


@dataclass(frozen=True)
class Ended:
    """A server's end: exit code and output."""

    code: int
    output: str


def launch(folder: Path, env: dict[str, str], engines: Engines, **arguments: object) -> Ended:
    """Run a server that is expected to end by itself; where it does not end, say what each of its processes was doing."""
    log = folder / "log.txt"
    process = engines.start(["-m", "sglang.launch_server", *flags({**CPU, **arguments})], folder, env, log)
    try:
        code = process.wait(patience(240))
    except subprocess.TimeoutExpired:
        names = running(process.pid)
        os.killpg(process.pid, signal.SIGABRT)  # faulthandler answers with the stacks of all threads
        process.wait(patience(20))
        pytest.fail(f"the server did not end; running: {names}\n{log.read_text(errors='replace')}")
    finally:
        left = left_behind(process.pid)
        kill_group(process.pid)
    assert not left, f"processes left behind: {left}"
    return Ended(code, log.read_text(errors="replace"))


def running(group: int) -> list[str]:
    """The processes of a process group, by name, zombies left out."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().partition("(")[2].rpartition(") ")
            state, _, pgrp = fields.split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(name)
    return found


def left_behind(group: int) -> list[str]:
    """What of a process group still runs after the time that processes which were told to end may take."""
    deadline = time.monotonic() + patience(20)
    while (left := running(group)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            IN_SCHEDULER + "    from sglang.srt.model_executor.model_runner import ModelRunner\n    del ModelRunner.forward",
            "could not hook sglang.srt.model_executor.model_runner.ModelRunner.forward",
        ),
        (
            IN_SCHEDULER + "    import atexit, time\n    atexit.register(time.sleep, 1000)\n"
            "    from sglang_uvm_offload.plugin import hooks\n    hooks.install = lambda: 1 / 0",
            "cannot register with this SGLang: ZeroDivisionError",
        ),
        (
            IN_SCHEDULER + "    from sglang_uvm_offload.cpu import memory\n    memory.host_available = lambda: 1 << 20",
            "the offloaded experts need 6.8 MiB of host RAM, and 0.0 MiB is left of 1.0 MiB after ",
        ),
        (
            "import sglang.srt.runtime_context as context\ndel context.publish",
            "could not hook sglang.srt.runtime_context.publish",
        ),
    ],
    ids=[
        "a hook point is gone in the scheduler",
        "registering fails in a scheduler that does not want to end",
        "host RAM is short",
        "a hook point is gone everywhere",
    ],
)
def test_a_server_that_was_asked_to_offload_ends_with_the_reason(
    code, reason, tmp_path, checkpoints: Checkpoints, engines: Engines
):
    env = saboteur(tmp_path, code)
    ended = launch(tmp_path, env, engines, model_path=checkpoints("qwen3_moe"), **OFFLOAD)
    assert ended.code != 0
    assert reason in ended.output


ON_THE_SAME_FUNCTIONS = (
    IN_SCHEDULER
    + """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_uvm_offload.plugin import hook_points, weight_writes
    for target in {*hook_points.HOOKED, *weight_writes.WRITERS}:
        HookRegistry.register(target, lambda original, *args, **kwargs: original(*args, **kwargs), HookType.AROUND)
"""
)


@pytest.mark.works("Launch", "another plugin on the same functions of SGLang")
def test_hooks_go_around_those_of_a_plugin_that_came_first(tmp_path, checkpoints: Checkpoints, engines: Engines):
    """SGLang applies the hooks of a function once; ours come when a process knows that it is to offload."""
    model = checkpoints("qwen3_moe")
    flags = {**OFFLOAD, "expert_offload_warmup_tokens": 16, "expert_offload_slots": 2}
    asked = {"text": PROMPTS[1], "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    with engines.server(model, env=saboteur(tmp_path, ON_THE_SAME_FUNCTIONS), **flags) as server:
        answer = server.post("/generate", asked)
        state = offload_state(server.get("/server_info"))
    assert answer["output_ids"] == engines.baseline(model).answers[1].output_ids
    assert state["offloaded_bytes"] > 0
    assert state["moves"] > 0
    assert state["slots"]


def test_a_wrong_flag_ends_the_command_before_anything_loads(tmp_path, checkpoints: Checkpoints, engines: Engines):
    model = checkpoints("qwen3_moe")
    ended = launch(tmp_path, environment({}), engines, model_path=model, expert_offload_num_resident=99)
    assert ended.code == 2
    assert "--expert-offload-num-resident 99: the model has 16 routed experts a layer" in ended.output
    assert "Load weight begin" not in ended.output


GIVE_ARGUMENTS = """
import pickle
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
for residents, path in {given}:
    args = ServerArgs(model_path={model}, device="cpu", expert_offload_num_resident=residents or None)
    args.resolve_once()
    pickle.dump(args, open(path, "wb"))
"""
PUBLISH = """
from sglang.srt import runtime_context
ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0)
runtime_context.publish(args, role="scheduler", ranks=ranks)
"""
TAKE_THEM_WITHOUT_PLUGINS = """
import pickle
if {plugin} == "registered":  # and SGLang did not apply it
    from sglang_uvm_offload.plugin import roles
    roles.watch()
args = pickle.load(open({given}, "rb"))
{publish}
print("SERVES")
"""


@pytest.fixture(scope="module")
def given(checkpoints: Checkpoints, sglang: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Files with the arguments of a server, as a process gives them to another, by the number of residents."""
    folder = tmp_path_factory.mktemp("given")
    files = {residents: folder / f"{residents}.pickle" for residents in (4, 0)}
    pairs = [(residents, str(path)) for residents, path in files.items()]
    ended = sglang.run(GIVE_ARGUMENTS.format(given=pairs, model=repr(str(checkpoints("qwen3_moe")))))
    assert ended.code == 0, ended.err[-3000:]
    return files


@pytest.mark.parametrize(("residents", "plugin"), [(4, "absent"), (4, "registered"), (0, "absent")])
def test_a_process_that_loads_no_plugins_ends_if_it_is_to_offload(residents, plugin, given, sglang: Nursery):
    """As the actors that ``--use-ray`` starts."""
    ended = sglang.run(
        TAKE_THEM_WITHOUT_PLUGINS.format(given=repr(str(given[residents])), plugin=repr(plugin), publish=PUBLISH)
    )
    if residents:
        assert ended.code == 1
        assert "this process must offload, but the plugin is not loaded or hooked here" in ended.err
        assert "SERVES" not in ended.out
    else:
        assert "SERVES" in ended.out, ended.err[-3000:]


SHOW_HOOKS = """
import json
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
args = ServerArgs(model_path={model}, device="cpu", **{arguments})
args.resolve_once()
{publish}
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.model_runner import ModelRunner
computing = (Scheduler.process_batch_result, ModelRunner.forward, ModelRunner.load_model, FusedMoE.__init__)
hooked = [f.__qualname__ for f in computing
          if hasattr(f, "__wrapped__") and "hook_registry" in f.__code__.co_filename]
print("RESULT", json.dumps([sorted(HookRegistry._patched), hooked]))
"""


@pytest.mark.parametrize("on", [False, True])
def test_only_a_scheduler_that_offloads_is_hooked_where_it_computes(on, checkpoints: Checkpoints, sglang: Nursery):
    program = SHOW_HOOKS.format(model=repr(str(checkpoints("qwen3_moe"))), arguments=OFFLOAD if on else {}, publish=PUBLISH)
    ended = sglang.run(program, SGLANG_PLUGINS="uvm_offload")
    assert ended.code == 0, ended.err[-3000:]
    patched, hooked = json.loads(ended.out.split("RESULT ")[1])
    if on:
        assert len(hooked) == 4
    else:
        # the arguments, and where the engine keeps their class
        assert patched == ["sglang.srt.entrypoints.engine.Engine.server_args_class", "sglang.srt.server_args.ServerArgs"]
        assert hooked == []


def test_prometheus_is_needed_by_servers_with_metrics_only(sglang: Nursery):
    """SGLang imports it for them alone, and runs where it is not installed."""
    blocked = "import sys\nsys.modules['prometheus_client'] = None\n"
    ended = sglang.run(blocked + "import sglang_uvm_offload.plugin.rank.scheduler_hooks")
    assert ended.code == 0, ended.err
    assert "prometheus_client" in sglang.run(blocked + "import sglang_uvm_offload.plugin.operate.metrics").err

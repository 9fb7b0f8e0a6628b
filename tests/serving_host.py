"""The process that runs engines for ``serving.Engines``: it imports SGLang once, then forks for each engine.

An engine with a small checkpoint spends nearly all of its start importing SGLang, in three processes. This process imports it
once. Each job is a fork of it, and the job's children (scheduler, detokenizer, ...) are forks of a copy that was made before
any plugin was loaded, just like spawned ones. So every engine still runs in fresh processes, and each loads plugins once, in
the same places as in a server.

It reads one JSON job per line from stdin, and writes ``{"pid": ...}`` when the job begins and ``{"exit": ...}`` when it ends.
The job's answers go to its ``result`` file, and all its output to its ``log`` file.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch

from scripts.harness.process import adopt_orphans, die_with_parent

# What a spawned child imports before it loads plugins, so that hooks find the same modules in the same state.
PRELOADED = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
)
# What the CPU shims import in each child while plugins load.
SHIMMED = (
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.layers.moe.fused_moe_native",
    "sglang.srt.layers.n_gram_embedding",
    "sglang.srt.models.deepseek_common.attention_backend_handler",
)


def main() -> None:
    import setproctitle  # a dependency of SGLang

    die_with_parent()
    adopt_orphans()
    setproctitle.getproctitle()  # locates the title now: it cannot once a job has added to the environment
    preload()
    answers = os.fdopen(os.dup(1), "w")
    tell(answers, ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            run_job(job)
        tell(answers, pid=pid)
        tell(answers, exit=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        reap()


def reap() -> None:
    """Reaps what earlier jobs left, which was killed with them, so that its CPU time counts for this process."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def preload() -> None:
    """Imports SGLang before forks."""
    for module in PRELOADED:
        importlib.import_module(module)
    for module in SHIMMED:
        importlib.import_module(module)
    if "STANDIN_KERNELS" in os.environ:
        torch.cuda._is_in_bad_fork = lambda: False  # SGLang has started CUDA; the stand-in survives a fork


def tell(answers: Any, **message: Any) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def run_job(job: dict[str, Any]) -> NoReturn:
    """Runs a job and never returns: whatever happens, this fork must not continue as a host."""
    code = 1
    try:
        die_with_parent()
        os.setsid()
        log_to(job["log"])
        os.environ.update(job["env"])
        sys.path[:0] = [entry for entry in job["env"].get("PYTHONPATH", "").split(os.pathsep) if entry not in sys.path]
        tempfile.tempdir = None  # makes tempfile read TMPDIR again
        fork_children_from_here()
        if "command" in job:
            run_command(job["command"], job["folder"])
        else:
            result = serve(job)
            with open(job["result"], "w") as file:
                json.dump(result, file)
        code = 0
    except SystemExit as end:
        traceback.print_exc()
        if isinstance(end.code, int):
            code = end.code
        elif end.code is None and "command" in job:
            code = 0  # like any program; an engine's job must leave a result
    except Exception:  # noqa: BLE001 - the job's log says what ended it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def log_to(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, target in ((0, nothing), (1, log), (2, log)):
        os.dup2(target, stream)


def fork_children_from_here() -> None:
    """Starts multiprocessing's fork server as a fork of this process in its current state, and makes SGLang spawn from it."""
    listener = socket.socket(socket.AF_UNIX)
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    listener.bind(address)
    listener.listen()
    alive_read, alive_write = os.pipe()
    resource_tracker.ensure_running()
    job = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os.close(alive_write)
        # A failing scheduler signals its parent, which SGLang takes to be the engine.
        signal.signal(signal.SIGQUIT, lambda *_: os.kill(job, signal.SIGQUIT))
        reuse_fork_server()
        end_as_if_spawned()
        forkserver.main(listener.fileno(), alive_read, [])
        os._exit(0)
    listener.close()
    os.close(alive_read)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_write, pid
    reuse_fork_server()


def reuse_fork_server() -> None:
    """Makes children use the same fork server for their own children instead of starting another one."""
    multiprocessing.set_start_method("forkserver", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    forkserver.ForkServer.ensure_running = lambda _: resource_tracker.ensure_running()  # type: ignore[method-assign]


def end_as_if_spawned() -> None:
    """Makes children run their ``atexit`` functions, as spawned ones do and a fork server's do not."""
    serve_one = forkserver._serve_one  # type: ignore[attr-defined]

    def serve_and_run_exit_functions(*arguments: Any) -> int:
        code = serve_one(*arguments)
        atexit._run_exitfuncs()
        return code

    forkserver._serve_one = serve_and_run_exit_functions  # type: ignore[attr-defined]


def run_command(command: list[str], folder: str) -> None:
    """Does what ``python`` does with these arguments, ``-m MODULE ...`` or ``SCRIPT ...``, in ``folder``."""
    import prometheus_client.values

    faulthandler.enable()
    os.chdir(folder)
    # prometheus_client reads this variable at import; in a new process SGLang sets it before that.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()
    if command[0] == "-m":
        sys.argv[1:] = command[2:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[1:] = command[1:]
        runpy.run_path(command[0], run_name="__main__")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**job["engine"])
    recorded = None
    if job["record_experts"]:
        engine.start_expert_distribution_record()
    answers = [answer for batch in job["batches"] for answer in generate(engine, batch, job["max_new_tokens"])]
    if job["record_experts"]:
        engine.stop_expert_distribution_record()
        recorded = recorded_counts(engine)
    info = json.loads(json.dumps(engine.get_server_info(), default=str))
    engine.shutdown()
    return {"answers": answers, "server_info": info, "expert_counts": recorded}


def generate(engine: Any, prompts: list[str], max_new_tokens: int) -> list[dict[str, Any]]:
    """Generates one batch greedily, with log-probabilities of input and output."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    return engine.generate(prompts, sampling, return_logprob=True, logprob_start_len=0)


def recorded_counts(engine: Any) -> list[list[int]]:
    """Returns the tokens routed to each expert of each layer, as SGLang's own recorder counts them."""
    import torch

    engine.dump_expert_distribution_record()
    folder = os.environ["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"]
    [dump] = [name for name in os.listdir(folder) if name.endswith(".pt")]
    counts = torch.load(os.path.join(folder, dump), weights_only=True)["logical_count"]
    return counts.sum(0).tolist()


if __name__ == "__main__":
    main()

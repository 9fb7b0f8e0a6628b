"""Run real SGLang engines and servers on a CPU from tests, in fresh processes that always end.

``Engines.run`` answers prompts with an engine of its own; ``Server`` is an HTTP server. Both take SGLang's own arguments
and add ``CPU``, what the tests' small machine needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from serving_host import die_with_parent

TESTS = Path(__file__).parent
SHIMS = TESTS / "shims"

CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "max_running_requests": 32,
    "random_seed": 1,
    "skip_server_warmup": True,
}

# Two ranks on two cores, and no NCCL to look for.
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}

# No compiler for functions that run a few times, no network, no tokenizer threads.
QUICK = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# The only variables of the tests that must be set before SGLang is imported.
READ_AT_IMPORT = ("TRITON_INTERPRET",)

START_SECONDS = 120
ANSWER_SECONDS = 300
RUN_SECONDS = 240

PROMPTS = ("hello world", "the quick brown fox jumps over 13 lazy dogs", "def f(x):\n    return x + 1\n")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one request was answered."""

    text: str
    output_ids: list[int]
    output_logprobs: list[float]
    input_logprobs: list[float | None]
    meta: dict[str, Any]

    @classmethod
    def of(cls, response: dict[str, Any]) -> Answer:
        meta = response["meta_info"]
        return cls(
            text=response["text"],
            output_ids=response["output_ids"],
            output_logprobs=[logprob for logprob, *_ in meta["output_token_logprobs"]],
            input_logprobs=[logprob for logprob, *_ in meta["input_token_logprobs"]],
            meta=meta,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """What an engine answered, and what it said of itself at the end."""

    answers: list[Answer]
    server_info: dict[str, Any]
    log: str
    expert_counts: list[list[int]] | None

    @property
    def offload(self) -> dict[str, Any]:
        return offload_state(self.server_info)


def offload_state(server_info: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """What the plugin reports of itself in ``/server_info``; empty where offloading is off."""
    return server_info["internal_states"][rank].get("expert_offload") or {}


def assert_offloaded(server_info: dict[str, Any], everything_resident: bool = False) -> None:
    """Offloading really was on: layers are managed, and with N < E some of their bytes are out of VRAM."""
    state = offload_state(server_info)
    assert state.get("num_layers", 0) > 0, f"nothing was offloaded: {state}"
    if everything_resident:
        assert state["offloaded_bytes"] == 0
        assert state["resident_bytes"] > 0
    else:
        assert state["offloaded_bytes"] > 0


def assert_same_answers(on: Result, off: Result, tolerance: float = 0.0) -> None:
    """Token by token the same text, with the same log-probabilities of input and output."""
    assert len(on.answers) == len(off.answers)
    for mine, theirs in zip(on.answers, off.answers, strict=True):
        assert mine.output_ids == theirs.output_ids
        assert_close(mine.output_logprobs, theirs.output_logprobs, tolerance)
        assert_close(mine.input_logprobs, theirs.input_logprobs, tolerance)


def assert_close(mine: Sequence[float | None], theirs: Sequence[float | None], tolerance: float) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        same = a == b or (a is not None and b is not None and abs(a - b) <= tolerance)
        assert same, f"log-probabilities differ: {a} and {b}"


def environment(env: dict[str, str]) -> dict[str, str]:
    """This process's environment with the shims of ``tests/shims`` in front, and ``env``."""
    path = os.pathsep.join([str(SHIMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **QUICK, **env}


def tail(path: Path, lines: int = 60) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class EngineFailed(AssertionError):
    """An engine that did not start, died, or took too long. Ends with its log's tail; all of it is in ``log``."""

    def __init__(self, what: str, log: Path):
        super().__init__(f"{what}; its log ends:\n{tail(log)}")
        self.log = log.read_text(errors="replace") if log.exists() else ""


class Host:
    """A ``serving_host.py`` process: SGLang imported, ready to fork engines."""

    def __init__(self, env: dict[str, str], log: Path):
        self.log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, str(TESTS / "serving_host.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=environment(env),
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.buffer = b""
        try:
            self.next_message(time.monotonic() + START_SECONDS)
        except BaseException:  # an interrupt too must not leave the process; it goes on from here
            self.close()
            raise

    def next_message(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            readable, _, _ = select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError
            data = os.read(self.stdout.fileno(), 65536)
            if not data:
                raise EngineFailed("the engine host died", self.log)
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def run(self, job: dict[str, Any], seconds: float) -> None:
        """Run one job to its end, and end every process it started."""
        self.stdin.write(json.dumps(job).encode() + b"\n")
        self.stdin.flush()
        deadline = time.monotonic() + seconds
        pid = self.next_message(deadline)["pid"]
        log = Path(job["log"])
        try:
            code = self.next_message(deadline)["exit"]
        except TimeoutError:
            kill_group(pid)
            self.next_message(time.monotonic() + 30)
            raise EngineFailed(f"the engine took longer than {seconds} s", log) from None
        finally:
            kill_group(pid)
        if code != 0:
            raise EngineFailed(f"the engine ended with exit code {code}", log)

    def close(self) -> None:
        kill_group(self.process.pid)
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


class Engines:
    """Runs engines one after the other, and remembers what the ones without offloading answered."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.scratch = Path(tempfile.mkdtemp(prefix="engines-"))  # short, for it holds sockets; engines are killed, not tidy
        self.jobs = 0
        self.host: Host | None = None
        self.host_env: dict[str, str] = {}
        self.baselines: dict[str, Result] = {}

    def run(
        self,
        checkpoint: Path,
        prompts: Sequence[str] = PROMPTS,
        *,
        together: bool = False,
        max_new_tokens: int = 16,
        record_experts: bool = False,
        env: dict[str, str] | None = None,
        seconds: float = RUN_SECONDS,
        **engine: Any,
    ) -> Result:
        """Answer ``prompts`` one after the other (or ``together``, as one batch) with an engine of its own."""
        self.jobs += 1
        folder = self.folder / f"engine-{self.jobs}"
        folder.mkdir(parents=True)
        env = {"TMPDIR": str(self.scratch), **(env or {})}
        host = self.host_for({name: value for name, value in env.items() if name in READ_AT_IMPORT})
        if record_experts:
            engine = {"expert_distribution_recorder_mode": "stat", **engine}
            env["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"] = str(folder)
        job = {
            "env": env,
            "engine": {**CPU, "model_path": str(checkpoint), **engine},
            "batches": [list(prompts)] if together else [[prompt] for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "record_experts": record_experts,
            "result": str(folder / "result.json"),
            "log": str(folder / "log.txt"),
        }
        host.run(job, seconds)
        result = json.loads((folder / "result.json").read_text())
        return Result(
            answers=[Answer.of(response) for response in result["answers"]],
            server_info=result["server_info"],
            log=(folder / "log.txt").read_text(errors="replace"),
            expert_counts=result["expert_counts"],
        )

    def baseline(self, checkpoint: Path, prompts: Sequence[str] = PROMPTS, **options: Any) -> Result:
        """``run``, once a session for the same arguments."""
        key = json.dumps([str(checkpoint), list(prompts), options], sort_keys=True)
        if key not in self.baselines:
            self.baselines[key] = self.run(checkpoint, prompts, **options)
        return self.baselines[key]

    def host_for(self, env: dict[str, str]) -> Host:
        """The host that was started with ``env``; only one is alive at a time."""
        if self.host is None or self.host_env != env or self.host.process.poll() is not None:
            self.close_host()
            self.host = Host(env, self.folder / "host.txt")
            self.host_env = env
        return self.host

    def close_host(self) -> None:
        if self.host is not None:
            self.host.close()
            self.host = None

    def close(self) -> None:
        self.close_host()
        shutil.rmtree(self.scratch)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def flags(arguments: dict[str, Any]) -> list[str]:
    """``{"tp_size": 2, "enable_metrics": True}`` as ``--tp-size 2 --enable-metrics``."""
    result = []
    for name, value in arguments.items():
        if value is not False and value is not None:
            result.append("--" + name.replace("_", "-"))
            if value is not True:
                result.append(str(value))
    return result


class Server:
    """A real HTTP server on a free port of this machine, from ``with`` to the end of its block.

    ``command`` is what is run (``sglang serve`` or ``python -m sglang.launch_server``); with ``config_file``, all arguments but
    the model are handed over in a YAML file instead of as flags. ``waiting`` is called with the seconds since the start, until
    the server is ready.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        command: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
        config_file: bool = False,
        on_cpu: bool = True,
        env: dict[str, str] | None = None,
        seconds: float = START_SECONDS,
        waiting: Callable[[float], None] = lambda _: None,
        **arguments: Any,
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seconds = seconds
        self.folder = Path(tempfile.mkdtemp(prefix="server-"))
        self.log_path = self.folder / "log.txt"
        env = {"TMPDIR": str(self.folder), **(env or {})}
        self.env = environment(env) if on_cpu else {**os.environ, **env}
        self.waiting = waiting
        checkpoint = checkpoint.absolute()  # the server runs in its own folder: what is installed is what is tested
        arguments = {**(CPU if on_cpu else {}), "host": "127.0.0.1", "port": self.port, **arguments}
        self.command = [*command, "--model-path", str(checkpoint)]
        self.command += self.config_flags(arguments) if config_file else flags(arguments)
        self.process: subprocess.Popen[bytes] | None = None

    def config_flags(self, arguments: dict[str, Any]) -> list[str]:
        path = self.folder / "server.yaml"
        lines = [f"{name.replace('_', '-')}: {json.dumps(value)}" for name, value in arguments.items()]
        path.write_text("\n".join(lines) + "\n")
        return ["--config", str(path)]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> Server:
        with self.log_path.open("wb") as sink:
            self.process = subprocess.Popen(
                self.command,
                stdout=sink,
                stderr=sink,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=die_with_parent,  # SGLang's own processes likewise die with theirs
            )
        try:
            self.wait_until_ready(time.monotonic() + self.seconds)
        except BaseException:  # an interrupt too must not leave the server; it goes on from here
            self.stop()
            raise
        return self

    def wait_until_ready(self, deadline: float) -> None:
        assert self.process is not None
        begin = time.monotonic()
        while time.monotonic() < deadline:
            self.waiting(time.monotonic() - begin)
            if self.process.poll() is not None:
                raise EngineFailed(f"the server ended with exit code {self.process.returncode}", self.log_path)
            with contextlib.suppress(OSError):
                if self.get_text("/health", seconds=5) is not None:
                    return
            time.sleep(0.2)
        raise EngineFailed(f"the server was not ready after {self.seconds} s", self.log_path)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        if error is None:
            shutil.rmtree(self.folder)
        else:
            print(f"the server's log ends:\n{tail(self.log_path)}", file=sys.stderr)

    def stop(self) -> None:
        """Ask it to end, and end its whole process group either way."""
        assert self.process is not None
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        kill_group(self.process.pid)
        self.process.wait()

    def open(self, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=seconds)

    def get_text(self, path: str, seconds: float = ANSWER_SECONDS) -> str:
        with self.open(path, seconds=seconds) as response:
            return response.read().decode()

    def get(self, path: str) -> Any:
        return json.loads(self.get_text(path))

    def post(self, path: str, body: Any) -> Any:
        with self.open(path, body) as response:
            return json.loads(response.read())

    def stream(self, path: str, body: Any) -> Iterator[Any]:
        """The events of a streamed answer."""
        with self.open(path, {**body, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))

"""Runs real SGLang engines and servers on a CPU from tests, in fresh processes that always end.

``Engines.run`` answers prompts with a new engine. It takes SGLang's arguments and adds ``CPU``, the settings for a small test
machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.harness.patience import patience
from scripts.harness.process import kill_group
from scripts.harness.server import (
    CPU,
    START_SECONDS,
    EngineFailed,
    Server,
    environment,
    for_ranks,
    gathered,
    offload_state,
)

TESTS = Path(__file__).parent

# Makes servers that a program starts import SGLang once instead of in each process.
FORKING = {"PYTHONPATH": os.pathsep.join([str(TESTS / "forking"), *filter(None, [os.environ.get("PYTHONPATH")])])}

# The tests' only variables that must be set before SGLang is imported.
READ_AT_IMPORT = ("TRITON_INTERPRET",)

RUN_SECONDS = patience(600)

PROMPTS = ("hello world", "the quick brown fox jumps over 13 lazy dogs", "def f(x):\n    return x + 1\n")


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one request."""

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
    """An engine's answers, and its server info at the end."""

    answers: list[Answer]
    server_info: dict[str, Any]
    log: str
    expert_counts: list[list[int]] | None

    @property
    def offload(self) -> dict[str, Any]:
        return offload_state(self.server_info)


def assert_offloaded(server_info: dict[str, Any], everything_resident: bool = False) -> None:
    """Asserts that offloading was on: layers are managed, and with N < E some of their bytes are outside VRAM."""
    state = offload_state(server_info)
    assert state.get("num_layers", 0) > 0, f"nothing was offloaded: {state}"
    if everything_resident:
        assert state["offloaded_bytes"] == 0
        assert state["resident_bytes"] > 0
    else:
        assert state["offloaded_bytes"] > 0


def assert_streamed(on: Result, some: bool = True) -> None:
    """Asserts that some steps streamed (or, without ``some``, that none did), and that no failure stopped streaming."""
    streaming = on.offload["streaming"]
    assert (on.offload["streamed_bytes"] > 0) == some, on.offload
    assert (streaming is not None) == some, streaming
    assert streaming is None or streaming["fault"] is None, streaming


def assert_same_answers(on: Result, off: Result, tolerance: float = 0.0) -> None:
    """Asserts equal text token by token, with equal log-probabilities of input and output."""
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


class Host:
    """A ``serving_host.py`` process, which has imported SGLang and forks engines."""

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
        except BaseException:  # even an interrupt must not leave the process behind
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

    def start(self, job: dict[str, Any]) -> Job:
        """Begins a job. The previous one has ended."""
        self.stdin.write(json.dumps(job).encode() + b"\n")
        self.stdin.flush()
        return Job(self, self.next_message(time.monotonic() + START_SECONDS)["pid"])

    def run(self, job: dict[str, Any], seconds: float) -> None:
        """Runs one job to its end, and ends every process it started."""
        log = Path(job["log"])
        running = self.start(job)
        try:
            code = running.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_group(running.pid)
            running.wait(patience(30))
            raise EngineFailed(f"the engine took longer than {seconds} s", log) from None
        finally:
            kill_group(running.pid)
        if code != 0:
            raise EngineFailed(f"the engine ended with exit code {code}", log)

    def close(self) -> None:
        kill_group(self.process.pid)
        self.process.wait()
        self.stdin.close()
        self.stdout.close()


class Job:
    """A fork of a host, with the methods of ``subprocess.Popen`` that its users call."""

    def __init__(self, host: Host, pid: int):
        self.host, self.pid = host, pid
        self.returncode: int | None = None

    def wait(self, timeout: float = RUN_SECONDS) -> int:
        if self.returncode is None:
            try:
                self.returncode = int(self.host.next_message(time.monotonic() + timeout)["exit"])
            except TimeoutError:
                raise subprocess.TimeoutExpired("a job of the engine host", timeout) from None
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ForkedServer(Server):
    """A server that runs in a fork of the engines' host."""

    def __init__(self, engines: Engines, checkpoint: Path, **options: Any):
        super().__init__(checkpoint, **options)
        self.engines = engines

    def start(self) -> Any:
        return self.engines.start(self.command[1:], self.folder, self.env, self.log_path)

    def stop(self) -> None:
        """Kills the server at once: SGLang's shutdown takes seconds, and its own tests wait for it themselves."""
        assert self.process is not None
        kill_group(self.process.pid)
        self.process.wait(patience(30))


class Engines:
    """Runs engines one after the other, and caches answers that several tests need."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.scratch = Path(tempfile.mkdtemp(prefix="engines-"))  # short: it holds sockets; killed engines do not clean up
        self.jobs = 0
        self.hosts: dict[str, Host] = {}
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
        """Answers ``prompts`` one after the other (or ``together``, as one batch) with a new engine."""
        self.jobs += 1
        folder = self.folder / f"engine-{self.jobs}"
        folder.mkdir(parents=True)
        env = {"TMPDIR": str(self.scratch), **for_ranks(engine), **(env or {})}
        host = self.host_for(env)
        if record_experts:
            engine = {"expert_distribution_recorder_mode": "stat", **engine}
            env["SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"] = str(folder)
        job = {
            "env": env,
            "engine": gathered({**CPU, "model_path": str(checkpoint), **engine}),
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

    def server(self, checkpoint: Path, **options: Any) -> Server:
        """Returns an HTTP server. Within its ``with`` block it is the host's only job."""
        return ForkedServer(self, checkpoint, **options)

    def start(self, command: Sequence[str], folder: Path, env: dict[str, str], log: Path) -> Job:
        """Does what ``python`` does with these arguments."""
        return self.host_for(env).start({"env": env, "command": list(command), "folder": str(folder), "log": str(log)})

    def baseline(self, checkpoint: Path, prompts: Sequence[str] = PROMPTS, **options: Any) -> Result:
        """As ``run``, but once per session for the same arguments."""
        key = json.dumps([str(checkpoint), list(prompts), options], sort_keys=True)
        if key not in self.baselines:
            self.baselines[key] = self.run(checkpoint, prompts, **options)
        return self.baselines[key]

    def host_for(self, env: dict[str, str]) -> Host:
        """Returns the host with the ``READ_AT_IMPORT`` variables of ``env``. Starts one if none is alive."""
        env = {name: value for name, value in env.items() if name in READ_AT_IMPORT}
        key = json.dumps(env, sort_keys=True)
        host = self.hosts.get(key)
        if host is None or host.process.poll() is not None:
            if host is not None:
                host.close()
            host = self.hosts[key] = Host(env, self.folder / f"host-{len(self.hosts)}.txt")
        return host

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        shutil.rmtree(self.scratch)

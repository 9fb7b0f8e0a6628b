"""Runs a real SGLang server for a script, a benchmark or a test, and always ends its processes.

``Server`` takes SGLang's own arguments. On a CPU it adds ``CPU``, the settings for a small machine, and runs SGLang with the
plugin in ``shims/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.harness.patience import patience
from scripts.harness.process import die_with_parent, kill_group, tail
from sglang_uvm_offload.flags import CONFIG, OPTIONS, PREFIX

SHIMS = Path(__file__).parent / "shims"

CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_decode_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 2048,
    "max_running_requests": 32,
    "random_seed": 1,
    "skip_server_warmup": True,
}

# Compile no function that runs only a few times; use no network and no tokenizer threads.
QUICK = {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

START_SECONDS = patience(300)
ANSWER_SECONDS = patience(300)
END_SECONDS = 10
"""A server that does not end within this time is killed."""


def offload_state(server_info: dict[str, Any], rank: int = 0) -> dict[str, Any]:
    """One rank's ``RankStatus`` from ``/server_info``, as JSON; empty if offloading is off."""
    return server_info["internal_states"][rank].get("expert_offload") or {}


def environment(env: dict[str, str]) -> dict[str, str]:
    """This process's environment with ``shims/`` first in PYTHONPATH, updated with ``QUICK`` and ``env``."""
    path = os.pathsep.join([str(SHIMS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **QUICK, **env}


def for_ranks(arguments: dict[str, Any]) -> dict[str, str]:
    """The environment variables that several ranks need on a CPU: each rank gets a core (SGLang would give each a NUMA node,
    and fails if there are too few), and NCCL is not searched for."""
    tp, pp, dp = (int(arguments.get(name) or 1) for name in ("tp_size", "pp_size", "dp_size"))
    if tp * pp * dp == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[rank % len(cores)]) for rank in range(tp * pp * dp)),
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
    }


class EngineFailed(AssertionError):
    """An engine did not start, died, or took too long. The message has the end of its log, ``log`` the whole."""

    def __init__(self, what: str, log: Path):
        super().__init__(f"{what}; its log ends:\n{tail(log)}")
        self.log = log.read_text(errors="replace") if log.exists() else ""


def free_port() -> int:
    """A port that nothing listens on, below the kernel's ephemeral ports: a server binds its port only once it has loaded, and
    until then the kernel could assign an ephemeral port to one of the connections of a busy machine."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := 10_000 + secrets.randbelow(10_000)))
            return port


def gathered(arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` with options such as ``expert_offload_warmup_tokens``, which are no flags of their own, moved into the JSON
    of ``--expert-offload-config``."""
    names = {PREFIX + name: name for name in OPTIONS}
    options = {names[name]: value for name, value in arguments.items() if name in names and value is not None}
    others = {name: value for name, value in arguments.items() if name not in names}
    return others | ({PREFIX + CONFIG: json.dumps(options, default=str)} if options else {})


def flags(arguments: dict[str, Any]) -> list[str]:
    """``{"tp_size": 2, "enable_metrics": True}`` as ``--tp-size 2 --enable-metrics``."""
    result = []
    for name, value in gathered(arguments).items():
        if value is not False and value is not None:
            result.append("--" + name.replace("_", "-"))
            if value is not True:
                result.append(str(value))
    return result


class Server:
    """A real HTTP server on a free local port, for the duration of a ``with`` block.

    ``command``: the command to run (``sglang serve`` or ``python -m sglang.launch_server``). With ``config_file``, it gets all
    arguments except the model in a YAML file instead of as flags. ``waiting`` is called with the seconds since the start, until
    the server is ready. The log is kept in ``log_path``; without one, it is deleted unless the block raises.
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
        log_path: Path | None = None,
        **arguments: Any,
    ):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.seconds = seconds
        self.folder = Path(tempfile.mkdtemp(prefix="server-"))
        self.log_path = log_path or self.folder / "log.txt"
        env = {"TMPDIR": str(self.folder), **(for_ranks(arguments) if on_cpu else {}), **(env or {})}
        self.env = environment(env) if on_cpu else {**os.environ, **env}
        self.waiting = waiting
        checkpoint = checkpoint.absolute()  # the server runs in its own folder: what is installed is what is tested
        arguments = {**(CPU if on_cpu else {}), "host": "127.0.0.1", "port": self.port, **arguments}
        self.command = [*command, "--model-path", str(checkpoint)]
        self.command += self.config_flags(arguments) if config_file else flags(arguments)
        self.process: subprocess.Popen[bytes] | None = None

    def config_flags(self, arguments: dict[str, Any]) -> list[str]:
        path = self.folder / "server.yaml"
        lines = [f"{name.replace('_', '-')}: {json.dumps(value)}" for name, value in gathered(arguments).items()]
        path.write_text("\n".join(lines) + "\n")
        return ["--config", str(path)]

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> Server:
        if self.process is None:
            self.process = self.start()
        else:  # started by ahead.py
            os.killpg(self.process.pid, signal.SIGCONT)
        try:
            self.wait_until_ready(time.monotonic() + self.seconds)
        except BaseException:  # also stop the server on an interrupt, which is re-raised
            self.stop()
            raise
        return self

    def start(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("wb") as sink:
            return subprocess.Popen(
                self.command,
                stdout=sink,
                stderr=sink,
                env=self.env,
                cwd=self.folder,
                start_new_session=True,
                preexec_fn=die_with_parent,  # SGLang's own processes do the same
            )

    def wait_until_ready(self, deadline: float) -> None:
        assert self.process is not None
        begin = time.monotonic()
        while time.monotonic() < deadline:
            self.waiting(time.monotonic() - begin)
            if self.process.poll() is not None:
                raise EngineFailed(f"the server ended with exit code {self.process.returncode}", self.log_path)
            with contextlib.suppress(OSError):
                if self.get_text("/health", seconds=patience(5)) is not None:
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
        """Ask the server to end, then kill its whole process group."""
        assert self.process is not None
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        kill_group(self.process.pid)
        self.process.wait()

    def give_up(self) -> None:
        """Kill a server that was started ahead; ``with`` starts it again."""
        if self.process is not None:
            kill_group(self.process.pid)
            self.process.wait()
            self.process = None

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

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until the server is idle. SGLang answers a request shortly before it has finished it, and refuses actions that
        need an idle server until then."""
        deadline = time.monotonic() + patience(seconds)
        while True:
            try:
                self.open("/flush_cache", {}).close()
                return
            except urllib.error.HTTPError as refused:
                if time.monotonic() > deadline:
                    raise EngineFailed(f"the server does not become idle: {refused}", self.log_path) from refused
                time.sleep(0.1)

    def stream(self, path: str, body: Any) -> Generator[Any, None, None]:
        """The events of a streamed response."""
        with self.open(path, {**body, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line.removeprefix(b"data: "))

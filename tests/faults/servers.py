"""Faults of real SGLang servers of two ranks, over emulated unified memory: every answer beside that of a server without this
plugin, and what a server leaves when it ends."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builders.plugins import saboteur
from checkpoints import Checkpoints
from faults.cases import DECIDE, LOOK, MOVE, SAVE
from faults.ranks import BAD, Fault, Outcome
from faults.served import ARMED, code
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.server import EngineFailed, Server, offload_state

TESTS = Path(__file__).resolve().parents[1]
START_SECONDS, ANSWER_SECONDS, END_SECONDS = patience(240), patience(120), patience(120)
"""The longest that a server may take to be ready or end with its reason, to answer, and to end after a signal or a
failure."""

OF_SGLANG = ("sem.", "psm_", "sgl_shm_mq_", "sglang_loads_", "multi_tokenizer_args", "torch_", "nccl-")
"""How the entries in /dev/shm begin that Python, torch and SGLang make."""

PEER_DIED = ("Connection reset by peer", "Connection closed by peer", "other ranks that didn't finish", "sigquit", "SIGQUIT")
"""What SGLang says of a rank that a signal ended."""

SHORT = [f"{word} is the number of this prompt" for word in ("one", "two", "three", "four")]
LONG = "the quick brown fox jumps over the lazy dog and does so again " * 2
PROMPTS = [*SHORT, LONG, "def f(x):\n    return x + 1\n", LONG + "once more", "hello world"]
TOKENS = 10

FLAGS: dict[str, Any] = {
    "expert_offload_num_resident": 6,
    "expert_offload_warmup_tokens": 24,
    "expert_offload_adapt": "continuous",
    "expert_offload_stream_tokens": 16,
}
COMMON: dict[str, Any] = {"dtype": "float32", "tp_size": 2}


def faults() -> Iterator[Fault]:
    memory = {"action": "emulated memory", "value": "injected"}
    for rank in (0, 1):
        for call, k in (("allocate", 3), ("place", 2)):
            job = {**memory, "call": call, "k": k, "rank": rank, "at": "load"}
            yield Fault("managed memory", "load", f"{call} {k}, rank {rank}", job, ("injected",))
    yield Fault("managed memory", "warm-up", "place 1, rank 1", {**memory, "call": "place", "k": 1, "rank": 1, "at": 1})
    yield Fault("managed memory", "serve", "place 1, rank 0", {**memory, "call": "place", "k": 1, "rank": 0, "at": 30})
    job = {"action": "host RAM", "value": 0, "rank": 1}
    yield Fault("host RAM", "load", "none is left, rank 1", {**job, "at": "load"}, ("host RAM", "memory"))
    yield Fault("host RAM", "serve", "none is left, rank 1", {**job, "at": 10})
    for call, value, rank in (
        *((DECIDE, "RuntimeError", 0), (DECIDE, "SystemExit", 0), (DECIDE, "hang", 0)),
        *((MOVE, "MemoryError", 1), (MOVE, "hang", 1), (LOOK, "hang", 0)),
    ):
        thread = {"action": "thread", "call": call, "k": 1, "value": value, "rank": rank, "at": 8}
        yield Fault("thread", "serve", f"{call.rpartition('.')[2]}: {value}, rank {rank}", thread, ("injected", "SystemExit"))
    copy = "sglang_uvm_offload.cpu.staging:CpuStaging.copy"
    for rank in (0, 1):
        broken = {"action": "thread", "call": copy, "k": 2, "value": "RuntimeError", "rank": rank, "at": 5}
        yield Fault("thread", "stream", f"copy: RuntimeError, rank {rank}", broken, ("an injected fault",))
    for how in ("folder gone", "path is a folder", "size limit", "locked by another", "fsync:ENOSPC", "replace:EROFS"):
        job = {"action": "files", "value": how, "rank": 0, "at": 12}
        yield Fault("files", "save", how, job, ("the profile could not be saved",), must_say=True, restarts=True)
    broken = {"action": "thread", "call": SAVE, "k": 1, "value": "MemoryError", "rank": 0, "at": 12}
    yield Fault("thread", "save", "save: MemoryError", broken)
    for seconds in (-3600, 10 * 365 * 86400):
        job = {"action": "clock", "value": seconds, "rank": 0, "at": 6}
        yield Fault("clock", "serve", f"the time of day jumps by {seconds:+d} s, rank 0", job)
    moving, saving = "sglang_uvm_offload.experts.layer:ExpertLayer.promote", "os:replace"
    for name, call, rank, at in (
        ("SIGKILL", "sglang_uvm_offload.experts.layer:ExpertLayer.allocate", 1, "load"),
        *(("SIGKILL", moving, rank, 4) for rank in (0, 1)),
        ("SIGKILL", "sglang_uvm_offload.streaming.streamer:Streamer.enter", 1, 4),
        ("SIGKILL", saving, 0, 12),
        ("SIGTERM", moving, 1, 4),
    ):
        job = {"action": "signal", "call": call, "k": 1, "value": name, "rank": rank, "at": at}  # type: ignore[dict-item]
        phase = "load" if at == "load" else "save" if call == saving else "stream" if "enter" in call else "re-advise"
        what = f"{name} in {call.rpartition('.')[2]}, rank {rank}"
        yield Fault("signal", phase, what, job, PEER_DIED, ends=1, restarts=True)


@dataclass
class Servers:
    folder: Path
    runs: int = 0
    expected: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checkpoint = Checkpoints(self.folder / "checkpoints")("qwen3_moe", dtype="float32")
        (self.folder / "engines").mkdir()
        self.engines = Engines(self.folder / "engines")

    def close(self) -> None:
        self.engines.close()

    def reference(self) -> None:
        """The answers of a server without this plugin."""
        with self.server({}) as server:
            self.expected = [ask(server, prompt) for prompt in PROMPTS]

    def server(self, env: dict[str, str], **flags: Any) -> Server:
        return self.engines.server(self.checkpoint, env=env, seconds=START_SECONDS, **COMMON, **flags)

    def judge(self, fault: Fault) -> Outcome:
        self.runs += 1
        folder = self.folder / "servers" / str(self.runs)
        (folder / "saved").mkdir(parents=True)
        before = shared_memory()
        outcome = Outcome("servers", fault.kind, fault.phase, fault.what, "served on")
        self._serve(fault, folder, outcome)
        if outcome.end not in BAD and (left := shared_memory() - before):
            outcome.end, outcome.detail = "leak", f"in /dev/shm: {sorted(left)}"
        if fault.restarts and outcome.end not in BAD:
            self._restart(folder, outcome)
        return outcome

    def _serve(self, fault: Fault, folder: Path, outcome: Outcome) -> None:
        saved = folder / "saved"
        flags = {**FLAGS, "expert_offload_save_profile": saved / "profile.npz", "expert_offload_trace": saved / "trace.npz"}
        env = saboteur(folder, code(TESTS, fault.job))
        server = self.server(env, **flags)
        try:
            with server:
                outcome.answers = self._ask(server, outcome)
                if outcome.end == "served on":
                    outcome.detail = json.dumps(offload_state(server.get("/server_info")).get("fault"))
                self._end(server, outcome)
                self._look_at_log(fault, server.log, outcome, saved)
        except EngineFailed as failed:
            outcome.end = "no reason" if "was not ready" not in str(failed) else "hang"
            outcome.detail = str(failed)[-2000:]
            self._look_at_log(fault, failed.log, outcome, saved)

    def _ask(self, server: Server, outcome: Outcome) -> int:
        """How many answers came. A server that died is no reason to ask on."""
        for number, (prompt, expected) in enumerate(zip(PROMPTS, self.expected, strict=True)):
            try:
                got = ask(server, prompt)
            except TimeoutError:
                outcome.end, outcome.detail = "hang", f"no answer within {ANSWER_SECONDS} s"
                return number
            except (OSError, urllib.error.URLError, ValueError) as error:
                outcome.end, outcome.detail = "no reason", f"no answer: {error}"
                return number
            if got != expected:
                outcome.end, outcome.detail = "wrong answer", f"{prompt!r}: {got}, not {expected}"
                return number
        return len(PROMPTS)

    def _end(self, server: Server, outcome: Outcome) -> None:
        """The server ends in time: by itself where it is broken, otherwise after a signal."""
        assert server.process is not None
        if outcome.end in ("served on", "wrong answer"):
            server.process.terminate()
        begin = time.monotonic()
        try:
            server.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            outcome.end, outcome.detail = "hang", f"the server did not end within {END_SECONDS} s; {outcome.detail}"
            return
        outcome.detail += f" (ended after {time.monotonic() - begin:.0f} s)"
        while time.monotonic() < begin + END_SECONDS and processes_of(server.process.pid):
            time.sleep(0.2)
        if left := processes_of(server.process.pid):
            outcome.end, outcome.detail = "leak", f"processes {left}"

    def _look_at_log(self, fault: Fault, log: str, outcome: Outcome, saved: Path) -> None:
        if ARMED not in log:
            outcome.end, outcome.detail = "not reached", log[-500:]
        elif outcome.end == "no reason":
            words = fault.reasons or ("injected",)
            lines = [line for line in log.splitlines() if any(word in line for word in words)]
            if lines:
                outcome.end, outcome.detail = "stopped with a reason", lines[-1][:400]
            else:
                outcome.detail += log[-2000:]
        if outcome.end == "served on" and fault.must_say and not any(word in log for word in fault.reasons):
            outcome.end, outcome.detail = "no reason", f"served on without a word: {log[-2000:]}"
        if outcome.end == "served on" and not fault.ends and (left := sorted(path.name for path in saved.glob(".*"))):
            outcome.end, outcome.detail = "leak", f"files {left}"

    def _restart(self, folder: Path, outcome: Outcome) -> None:
        """The next start, on what is left: the server answers, and leaves only the files that its flags name."""
        saved = folder / "saved"
        if saved.is_file():
            saved.unlink()
        saved.mkdir(exist_ok=True)
        for path in saved.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        flags = {**FLAGS, "expert_offload_save_profile": saved / "profile.npz", "expert_offload_trace": saved / "trace.npz"}
        if (saved / "profile.npz").exists():
            flags["expert_offload_profile"] = saved / "profile.npz"
        again = Outcome("servers", outcome.kind, outcome.phase, outcome.what, "served on")
        try:
            with self.server({}, **flags) as server:
                self._ask(server, again)
                self._end(server, again)
        except EngineFailed as failed:
            again.end, again.detail = "no restart", str(failed)[-2000:]
        if again.end == "served on" and (left := sorted(path.name for path in saved.glob(".*"))):
            again.end, again.detail = "leak", f"after the next start: files {left}"
        if again.end != "served on":
            outcome.end, outcome.detail = ("leak" if again.end == "leak" else "no restart"), again.detail


def ask(server: Server, prompt: str) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    with server.open("/generate", {"text": prompt, "sampling_params": sampling}, seconds=ANSWER_SECONDS) as response:
        return json.loads(response.read())["output_ids"]


def shared_memory() -> set[str]:
    """Entries of /dev/shm that neither Python nor SGLang makes: those stay wherever one of SGLang's processes is killed, with
    this plugin or without."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(OF_SGLANG)}


def session_of(leader: int) -> Iterator[Path]:
    """The folders in /proc of the processes that live in a session."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                yield stat.parent


def processes_of(session: int) -> list[str]:
    """Their commands."""
    return [(folder / "comm").read_text().strip() for folder in session_of(session) if folder.exists()]

"""Faults of real SGLang engines over the stand-in CUDA driver, with default graphs. Kernels other than this project's compute
nothing there, so tokens say nothing: the bytes of every expert are compared, after each step, with those of a run without
faults."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builders.plugins import saboteur
from builders.rooms import fraction
from checkpoints import Checkpoints
from faults.cases import DECIDE, MOVE
from faults.ranks import Fault, Outcome
from faults.served import ARMED, MANAGER, code
from faults.servers import processes_of, shared_memory
from faults.witness import WRONG, Look, looks
from serving import Host
from standin import engine
from standin.build import build, sglang_environment
from standin.serving import GPU

from scripts.harness.patience import patience
from scripts.harness.process import kill_group
from scripts.harness.server import gathered
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

TESTS = Path(__file__).resolve().parents[1]
FIRST_SECONDS, ENGINE_SECONDS, END_SECONDS = patience(600), patience(120), patience(20)
"""The longest that the first engine may take, which compiles, that the others may, which take about six seconds, and that their
processes may live on."""

LAYERS, RESIDENT, SLOTS, EXPERTS, EXPERT_BYTES = 5, 4, 4, 16, 768 << 10
TENSORS = 2
"""Expert tensors per layer."""
BUFFER = EXPERTS * EXPERT_BYTES
"""A stream buffer. There are two, or one beside slots, which are too few to stream into."""
FIRST = 9
"""Every token picks four experts from this one on, of which none is resident at first."""
WARMUP, STREAM_TOKENS = 16, 16
PROMPTS = ["hello world", "the quick brown fox jumps over the lazy dog " * 3, "hello once more"]
"""The second one streams."""
TOKENS = 16

FLAGS: dict[str, Any] = {
    "expert_offload_num_resident": "auto",
    "expert_offload_headroom_gb": 0.0,
    "expert_offload_warmup_tokens": WARMUP,
    "expert_offload_adapt": "continuous",
    "expert_offload_stream_tokens": STREAM_TOKENS,
}

RESELECT = "sglang_uvm_offload.residency.residents:TargetResidents.after_warmup"
ENTER = "sglang_uvm_offload.streaming.streamer:Streamer.enter"
AT: dict[str, Any] = {
    "load": "load",
    "capture": f"{MANAGER}.finish_model",
    "warm-up": 0,
    "serve": 12,
    "re-advise": RESELECT,
    "stream": "sglang_uvm_offload.streaming.streamer:Streamer.begin_step",
}
"""When a fault of a phase is armed: see ``served.install``."""

KILLED = ("exit code -9", "exit code: -9", "exitcode=-9", "crashed")
"""What SGLang says of a scheduler that was killed."""

WORDS = {
    "1": "invalid argument",
    "2": "out of memory",
    "719": "unspecified launch failure",
    "719!": "unspecified launch failure",
    "801": "operation not supported",
}
CUDA_CALLS: dict[str, tuple[str, ...]] = {
    "load": (
        *("cudaMallocManaged:3:2", "cudaMemAdvise:1:801", "cudaMemPrefetchAsync:2:2", "cudaMemPrefetchAsync:1:719!"),
        *("cudaStreamSynchronize:1:719!", "cudaMemGetInfo:1:1"),
    ),
    "capture": ("cudaLaunchKernel:40:719!", "cudaHostAlloc:1:2", "cudaEventCreate:1:2"),
    "warm-up": ("cudaGraphLaunch:1:719!", "cudaLaunchKernel:1:2", "cudaHostAlloc:1:2", "cudaMemGetInfo:1:2"),
    "serve": ("cudaEventRecord:1:1", "cudaEventQuery:1:719!", "cudaMemcpyAsync:1:2", "cudaGraphLaunch:2:2"),
    "re-advise": ("cudaEventSynchronize:1:719!", "cudaLaunchKernel:1:719!"),
    "stream": ("cudaLaunchKernel:1:2", "cudaEventRecord:1:2", "cudaStreamWaitEvent:1:1", "cudaMemcpyAsync:1:719!"),
}
MOVES = ("cudaMemPrefetchAsync:1:2", "cudaMemPrefetchAsync:2:801", "cudaMemAdvise:1:1")
"""Calls of the mover's thread. The engine logs their failure and serves on."""
SLOT_CALLS: dict[str, tuple[str, ...]] = {
    "load": ("cudaMemPrefetchAsync:1:2", "cudaMemAdvise:2:1"),
    "capture": ("cudaMemcpyAsync:4:2", "cudaLaunchKernel:40:2"),
    "warm-up": ("cudaLaunchKernel:1:719!", "cudaMemcpyAsync:1:2"),
    "serve": ("cudaLaunchKernel:1:2", "cudaGraphLaunch:1:719!"),
    "stream": ("cudaLaunchKernel:1:2",),
}


def faults() -> Iterator[Fault]:
    for slots, calls in ((False, CUDA_CALLS), (True, SLOT_CALLS)):
        for phase, rules in calls.items():
            for rule in rules:
                yield _call(phase, rule, slots)
        for rule in MOVES[: 1 if slots else None]:
            yield _call("re-advise", rule, slots, must_say=True)
        yield from _around(slots)
    yield _call("re-advise", "cudaMemPrefetchAsync:1:719!", False)
    yield _call("re-advise", "cudaMemPrefetchAsync:1:hang", False)
    yield _call("re-advise", "cudaMemPrefetchAsync:3:hang", True)
    for call, value in ((DECIDE, "RuntimeError"), (MOVE, "MemoryError"), (MOVE, "hang")):
        job = {"action": "thread", "call": call, "k": 1, "value": value}
        yield _fault("thread", "re-advise", f"{call.rpartition('.')[2]}: {value}", job, False, ("injected",))
    for phase, call in (
        ("load", "sglang_uvm_offload.experts.layer:ExpertLayer.allocate"),
        ("re-advise", "sglang_uvm_offload.experts.layer:ExpertLayer.promote"),
        ("stream", ENTER),
    ):
        job = {"action": "signal", "call": call, "k": 1, "value": "SIGKILL"}
        yield _fault("signal", phase, f"SIGKILL in {call.rpartition('.')[2]}", job, False, KILLED)


def _call(phase: str, rule: str, slots: bool, **more: Any) -> Fault:
    kind, k, code = rule.split(":")
    what = f"{kind} {k}: {'never returns' if code == 'hang' else WORDS[code]}"
    return _fault("CUDA call", phase, what, {"action": "cuda call", "value": rule}, slots, (WORDS.get(code, "hang"),), **more)


def _around(slots: bool) -> Iterator[Fault]:
    full = ("out of memory", "of VRAM", "host RAM", "enough memory")
    evicted = {"action": "eviction", "value": "slots" if slots else 1}
    yield _fault("VRAM taken", "serve", f"{'slots' if slots else 'residents'} are evicted", evicted, slots, ())
    for phase in ("load", "serve", "re-advise", "stream"):
        yield _fault("VRAM taken", phase, "another process leaves 0 MiB of VRAM", {"action": "VRAM", "value": 0}, slots, full)
    for phase in ("load", "re-advise"):
        yield _fault("host RAM", phase, "0 MiB are left", {"action": "host RAM", "value": 0}, slots, full)


def _fault(kind: str, phase: str, what: str, job: dict[str, Any], slots: bool, reasons: tuple[str, ...], **more: Any) -> Fault:
    job = {**job, "rank": 0, "at": AT[phase], "slots": slots}
    return Fault(kind, phase, f"{what}{' (slots)' if slots else ''}", job, reasons, **more)


@dataclass
class Engines:
    folder: Path
    runs: int = 0
    expected: dict[bool, Look] = field(default_factory=dict)
    """The last look of an engine without faults, with and without slots."""

    def __post_init__(self) -> None:
        self.checkpoint = Checkpoints(self.folder / "unified")("qwen3_moe", expert_size=512, layers=LAYERS)
        cuda = self.folder / "unified" / "cuda"
        build(cuda)
        env = sglang_environment(cuda, Path(os.devnull), self.folder / "unified" / "caches")
        env["STANDIN_FIRST_EXPERT"] = str(FIRST)
        self.path = env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])
        del env["STANDIN_LOG"]
        self.host = Host(env, self.folder / "unified" / "host.txt")

    def close(self) -> None:
        self.host.close()

    def reference(self) -> None:
        """Engines without faults. The first one fills the caches of what is compiled."""
        for slots in (False, True):
            none = _fault("none", "load", "none", {"action": "none"}, slots, ())
            outcome, log = self._run(none, FIRST_SECONDS)
            assert outcome.end == "served on", f"{outcome}\n{log}"
            self.expected[slots] = looks(log)[-1]

    def judge(self, fault: Fault) -> Outcome:
        before = shared_memory()
        outcome, log = self._run(fault, ENGINE_SECONDS)
        judge_bytes(fault, log, self.expected[fault.job["slots"]], outcome)
        if outcome.end == "served on" and (left := shared_memory() - before):
            outcome.end, outcome.detail = "leak", f"in /dev/shm: {sorted(left)}"
        return outcome

    def _run(self, fault: Fault, seconds: float) -> tuple[Outcome, str]:
        self.runs += 1
        folder = self.folder / "unified" / f"run {self.runs}"
        folder.mkdir()
        outcome = Outcome("engines", fault.kind, fault.phase, fault.what, "served on")
        running = self.host.start(self._job(folder, fault))
        try:
            ended = running.wait(seconds)
        except subprocess.TimeoutExpired:
            outcome.end, ended = "hang", None
        until = time.monotonic() + END_SECONDS
        while ended is not None and processes_of(running.pid) and time.monotonic() < until:
            time.sleep(0.1)
        left = processes_of(running.pid)
        kill_group(running.pid)
        running.wait(END_SECONDS)
        log = (folder / "log.txt").read_text(errors="replace")
        if ended is None:
            outcome.detail = f"took longer than {seconds} s: {log[-3000:]}"
        elif left:
            outcome.end, outcome.detail = "leak", f"processes {left}"
        elif ended != 0:
            lines = [line for line in log.splitlines() if any(word in line for word in fault.reasons)]
            outcome.end = "stopped with a reason" if lines else "no reason"
            outcome.detail = lines[-1][-400:] if lines else f"exit code {ended}: {log[-3000:]}"
        else:
            self._look_at_answers(fault, json.loads((folder / "result.json").read_text()), log, outcome)
        return outcome, log

    def _job(self, folder: Path, fault: Fault) -> dict[str, Any]:
        slots = fault.job["slots"]
        buffers, beside = (BUFFER, TENSORS * BLOCK_BYTES) if slots else (2 * BUFFER, 0)  # slots end in blocks of their own
        rows = RESIDENT + SLOTS if slots else RESIDENT
        room = fraction(self.checkpoint, rows, GPU["max_total_tokens"], buffers + beside, LAYERS, measured=True)
        flags = {**FLAGS, "expert_offload_stream_buffer_gb": buffers / 2**30, "mem_fraction_static": room}
        flags |= {"expert_offload_slots": "auto" if slots else 0}
        job = {
            "engine": gathered({"model_path": str(self.checkpoint), **GPU, **flags}),
            "prompts": PROMPTS,
            "max_new_tokens": TOKENS,
            "result": str(folder / "result.json"),
        }
        (folder / "job.json").write_text(json.dumps(job))
        env = {"PYTHONPATH": f"{folder}{os.pathsep}{self.path}", "TMPDIR": str(self.folder)}
        saboteur(folder, code(TESTS, fault.job, witness=True))
        command = [engine.__file__, str(folder / "job.json")]
        return {"env": env, "command": command, "folder": str(folder), "log": str(folder / "log.txt")}

    @staticmethod
    def _look_at_answers(fault: Fault, result: dict[str, Any], log: str, outcome: Outcome) -> None:
        given = [len(answer["output_ids"]) for answer in result["answers"]]
        state = result["server_info"]["internal_states"][0]["expert_offload"]
        if given != [TOKENS] * len(PROMPTS):
            outcome.end, outcome.detail = "wrong answer", f"answers of {given} tokens"
        elif fault.must_say and not any(reason in (state["fault"] or "") for reason in fault.reasons):
            outcome.end, outcome.detail = "no reason", f"served on without a word: {state['fault']}; {log[-2000:]}"
        else:
            outcome.detail = f"{state['fault']}; streaming: {(state['streaming'] or {}).get('fault')}"


def judge_bytes(fault: Fault, log: str, expected: Look, outcome: Outcome) -> None:
    """What a scheduler saw, beside what one without faults saw at last."""
    seen = looks(log)
    wrong = [line for line in log.splitlines() if WRONG in line]
    if wrong or any(look.checksum != expected.checksum for look in seen):
        outcome.end, outcome.detail = "wrong answer", "\n".join(wrong) or f"{seen}, not {expected}"
    elif outcome.end != "served on" and ARMED in log:
        return
    elif ARMED not in log or (fault.kind == "CUDA call" and seen and not seen[-1].failures):
        outcome.end, outcome.detail = "not reached", log[-500:]
    elif not seen:
        outcome.end, outcome.detail = "wrong answer", "nobody looked at the experts"
    elif seen[-1].managed_bytes > expected.managed_bytes:
        outcome.end, outcome.detail = "leak", f"{seen[-1].managed_bytes} managed bytes, not {expected.managed_bytes}"

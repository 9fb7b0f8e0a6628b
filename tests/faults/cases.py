"""Which faults are tried on ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from faults.ranks import Fault

CODES = {
    "2": ("out of memory", "out of memory"),
    "1": ("invalid value", "invalid argument"),
    "719!": ("launch failure, sticky", "unspecified launch failure"),
    "801": ("not supported", "operation not supported"),
}
"""What STANDIN_FAIL is given: what it is called here, and what a rank that stops says."""

MANAGER = "sglang_uvm_offload.residency"
DECIDE = f"{MANAGER}.adaptation:Adaptation.decide"
MOVE = f"{MANAGER}.mover:Mover.move"
LOOK = f"{MANAGER}.evictions:Evictions.check"
SAVE = "sglang_uvm_offload.routing.profile_file:ProfileFile._save"
SLOTS = "sglang_uvm_offload.cuda.slots:CudaSlots"
PLACE = "sglang_uvm_offload.experts.tensor:ExpertTensor.place"

NUM_SLOTS, ROOM = 4, 11
"""A layer's: a rank with the first streams through buffers, one with the other into its slots. A rank with slots takes four
seconds over the stand-in, where its kernels are slow."""
SLOT_CALLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("load", PLACE, ("cudaMemAdvise", "cudaMemPrefetchAsync", "cudaStreamSynchronize")),
    ("load", f"{SLOTS}.__init__", ("cudaMemcpyAsync", "cudaLaunchKernel", "cudaStreamSynchronize")),
    ("warm-up", f"{SLOTS}.set_share", ("cudaHostAlloc", "cudaMemcpyAsync", "cudaEventRecord")),
    ("warm-up", f"{SLOTS}.begin_step", ("cudaLaunchKernel",)),
    ("warm-up", f"{SLOTS}.resolve", ("cudaLaunchKernel",)),
    ("re-advise", f"{SLOTS}.set_share", ("cudaMemcpyAsync",)),
    ("re-advise", f"{SLOTS}.resolve", ("cudaLaunchKernel",)),
    ("stream", f"{SLOTS}.begin_step", ("cudaHostAlloc", "cudaMemcpyAsync", "cudaLaunchKernel")),
    ("save", f"{SLOTS}.resolve", ("cudaLaunchKernel",)),
)
"""What a rank calls for its slots: phase, place and kinds. Slots are placed before the experts of their tensor."""
STREAM_CALLS = (
    *(("bring", "cudaLaunchKernel", 1), ("bring", "cudaLaunchKernel", 2), ("bring", "cudaEventRecord", 1)),
    *(("bring", "cudaStreamWaitEvent", 1), ("await_brought", "cudaStreamWaitEvent", 1)),
    *(("begin_step", "cudaLaunchKernel", 1), ("resolve", "cudaLaunchKernel", 1)),
)
"""What a rank calls for a step that streams into slots: method, kind, and which of the calls fails."""


def cuda_calls(census: Mapping[str, Mapping[str, int]], job: Mapping[str, Any] | None = None) -> Iterator[Fault]:
    """Each kind of call in each phase that makes some: the first, one in the middle and the last, with every code once."""
    for phase, counts in census.items():
        for kind, count in counts.items():
            if not count:
                continue
            calls = [1, (count + 1) // 2, count]
            for number, (code, (name, words)) in enumerate(CODES.items()):
                k = calls[number % len(calls)]
                what = f"{kind} {k} of {count}: {name}"
                fail = {**(job or {}), "action": "cuda call", "value": f"{kind}:{k}:{code}"}
                # Counters stay exact whatever fails, so a rank may go on without a word only if it says so.
                yield Fault("CUDA call", phase, what, fail, (words,))


def surroundings() -> Iterator[Fault]:
    yield from full_memory()
    yield from emulated_memory()
    yield from threads()
    yield from files()
    yield from signals()
    for seconds in (-10 * 365 * 86400, -3600, 3600, 10 * 365 * 86400):
        for phase in ("load", "serve", "save"):
            job = {"action": "clock", "value": seconds}
            yield Fault("clock", phase, f"the time of day jumps by {seconds:+d} s", job, restarts=phase == "save")


def full_memory() -> Iterator[Fault]:
    phases = ("load", "warm-up", "serve", "re-advise", "stream", "look", "save")
    full = ("out of memory", "of VRAM is free", "host RAM", "free")
    for phase in phases:
        for left in (0, 1 << 20, 16 << 20):
            what = f"another process leaves {left >> 20} MiB of VRAM"
            yield Fault("VRAM taken", phase, what, {"action": "VRAM", "value": left}, full)
        for value in (0, 1 << 30, "ENOENT", "EIO"):
            left = f"{value >> 20} MiB of host RAM are left" if isinstance(value, int) else f"reading host RAM: {value}"
            reasons = full if isinstance(value, int) else ("/proc/meminfo",)
            for backend in ("uvm", "emulated"):
                job = {"action": "host RAM", "value": value, "backend": backend}
                yield Fault("host RAM", phase, f"{left} ({backend})", job, reasons)
        for value in ("full", "over", "empty"):
            yield Fault("cgroup", phase, f"its limit: {value}", {"action": "cgroup", "value": value}, (*full, "memory.max"))
        job = {"action": "mmap", "value": 1 << 20}
        yield Fault(
            "mmap",
            phase,
            "no more can be mapped",
            job,
            (*full, "allocate", "Cannot allocate", "MemoryError", "bad_alloc", "start new thread"),
        )
        if phase != "load":
            yield Fault("VRAM taken", phase, "residents are evicted", {"action": "eviction", "value": 2})


def emulated_memory() -> Iterator[Fault]:
    counts = {"load": (1, 4), "warm-up": (1, 2), "re-advise": (1, 2, 3), "look": (1,)}
    for phase, ks in counts.items():
        for call in ("allocate", "place", "info", "in_vram"):
            for k in ks:
                job = {"action": "emulated memory", "backend": "emulated", "call": call, "k": k, "value": "injected"}
                yield Fault("managed memory", phase, f"{call} {k}", job, ("injected",))


def threads() -> Iterator[Fault]:
    for phase in ("warm-up", "serve", "re-advise"):
        for call in (DECIDE, MOVE, LOOK):
            for value in ("MemoryError", "RuntimeError", "SystemExit", "hang"):
                for backend in ("uvm", "emulated"):
                    name = call.rpartition(".")[2]
                    job = {"action": "thread", "call": call, "k": 1, "value": value, "backend": backend}
                    yield Fault("thread", phase, f"{name}: {value} ({backend})", job, ("injected", "SystemExit"))
    for value in ("MemoryError", "RuntimeError", "ValueError"):
        for phase in ("save", "end"):
            job = {"action": "thread", "call": SAVE, "k": 1, "value": value}
            yield Fault("thread", phase, f"save: {value}", job, ("injected",), restarts=True)


def files() -> Iterator[Fault]:
    ways = ["folder gone", "folder is a file", "path is a folder", "file of another kind", "damaged file", "size limit"]
    ways += ["no handles", "locked by another"]
    ways += [f"{call}:{name}" for call in ("fsync", "replace") for name in ("ENOSPC", "EROFS", "EIO", "EDQUOT", "ESTALE")]
    for how in ways:
        for phase in ("save", "end"):
            job = {"action": "files", "value": how}
            yield Fault("files", phase, how, job, ("the profile could not be saved",), must_say=True, restarts=True)


def signals() -> Iterator[Fault]:
    where = {
        "move": ("re-advise", "sglang_uvm_offload.experts.layer:ExpertLayer.promote", 1),
        "demotion": ("re-advise", "sglang_uvm_offload.experts.layer:ExpertLayer.demote", 2),
        "load": ("load", "sglang_uvm_offload.experts.layer:ExpertLayer.allocate", 3),
        "stream": ("stream", "sglang_uvm_offload.streaming.streamer:Streamer.enter", 2),
        "save, before fsync": ("save", "os:fsync", 1),
        "save, before the rename": ("save", "os:replace", 1),
        "save, while writing": ("save", "numpy.lib.format:write_array", 1),
        "last save": ("end", "os:replace", 1),
    }
    for what, (phase, call, k) in where.items():
        for name in ("SIGKILL", "SIGTERM"):
            ends = -getattr(signal, name)
            job = {"action": "signal", "call": call, "k": k, "value": name}
            yield Fault("signal", phase, f"{name} in a {what}", job, ends=ends, restarts=True)


def with_slots() -> Iterator[Fault]:
    """What slots add: their own CUDA calls, and what happens around them while they hold experts."""
    for fault in (*_slot_calls(), *_around_slots()):
        yield replace(fault, job={**fault.job, "slots": NUM_SLOTS})
    for fault in (*_stream_calls(), *_around_streams()):
        yield replace(fault, job={**fault.job, "slots": ROOM})


def _stream_calls() -> Iterator[Fault]:
    for number, (method, kind, k) in enumerate(STREAM_CALLS):
        for code, (name, words) in [*CODES.items()][number % 2 :: 2]:
            fail = {"action": "cuda call", "within": f"{SLOTS}.{method}", "value": f"{kind}:{k}:{code}"}
            yield Fault("CUDA call", "stream", f"{kind} {k} in CudaSlots.{method}, into slots: {name}", fail, (words,))


def _around_streams() -> Iterator[Fault]:
    yield Fault("VRAM taken", "stream", "slots that are streamed into are evicted", {"action": "eviction", "value": "slots"})
    for backend in ("uvm", "emulated"):
        job = {"action": "weights", "value": "told", "backend": backend}
        yield Fault("weights", "stream", f"replaced before a stream into slots ({backend})", job)


def _slot_calls() -> Iterator[Fault]:
    """The first of each kind in each place, with two of the codes, by turns."""
    codes = [*CODES.items()]
    number = 0
    for phase, within, kinds in SLOT_CALLS:
        for kind in kinds:
            for code, (name, words) in codes[number % 2 :: 2]:
                fail = {"action": "cuda call", "within": within, "value": f"{kind}:1:{code}"}
                what = f"{kind} in {within.rpartition(':')[2]}: {name}"
                yield Fault("CUDA call", phase, what, fail, (words,))
            number += 1


def _around_slots() -> Iterator[Fault]:
    full = ("out of memory", "of VRAM is free", "host RAM", "free")
    for phase in ("load", "warm-up", "re-advise", "stream"):
        job: dict[str, Any] = {"action": "VRAM", "value": 0}
        yield Fault("VRAM taken", phase, "another process leaves 0 MiB of VRAM", job, full)
    for phase in ("warm-up", "serve", "re-advise", "stream"):
        yield Fault("VRAM taken", phase, "slots are evicted", {"action": "eviction", "value": "slots"})
    yield Fault("VRAM taken", "re-advise", "residents are evicted", {"action": "eviction", "value": 2})
    failing = {"action": "weights", "within": f"{SLOTS}.reset", "value": "cudaMemcpyAsync:1:2"}
    yield Fault("weights", "re-advise", "replaced, and slots cannot be emptied", failing, ("out of memory",))
    for backend in ("uvm", "emulated"):
        for phase in ("load", "re-advise"):
            job = {"action": "host RAM", "value": 0, "backend": backend}
            yield Fault("host RAM", phase, f"0 MiB of host RAM are left ({backend})", job, full)
        for phase in ("serve", "re-advise", "stream"):
            job = {"action": "weights", "value": "told", "backend": backend}
            yield Fault("weights", phase, f"replaced while slots hold some ({backend})", job)
        for call in (DECIDE, MOVE):
            for value in ("RuntimeError", "hang"):
                job = {"action": "thread", "call": call, "k": 1, "value": value, "backend": backend}
                yield Fault("thread", "re-advise", f"{call.rpartition('.')[2]}: {value} ({backend})", job, ("injected",))
    for phase, k in (("load", 1), ("re-advise", 2)):
        job = {"action": "emulated memory", "backend": "emulated", "call": "place", "k": k, "value": "injected"}
        yield Fault("managed memory", phase, f"place {k}", job, ("injected",))

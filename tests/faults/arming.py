"""What a fault does to a rank, at the beginning of the phase that it names."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import importlib
import itertools
import math
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from faults.rank import Rank

    from sglang_uvm_offload.experts.layer import ExpertLayer
    from sglang_uvm_offload.experts.tensor import ExpertTensor

Job = dict[str, Any]
Told = dict[str, Any]
Action = Callable[[Job, "Rank", Told], None]

KINDS = (
    *("cudaMalloc", "cudaMallocManaged", "cudaHostAlloc", "cudaFree", "cudaMemGetInfo", "cudaMemAdvise"),
    *("cudaMemPrefetchAsync", "cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync"),
    *("cudaLaunchKernel", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority", "cudaStreamSynchronize"),
    *("cudaStreamIsCapturing", "cudaThreadExchangeStreamCaptureMode", "cudaDeviceSynchronize", "cudaStreamWaitEvent"),
    *("cudaEventCreate", "cudaEventRecord", "cudaEventQuery", "cudaEventSynchronize"),
)
"""The calls that fail in turn. Each is one that the stand-in can fail."""


def arm(job: Job, told: Told) -> Callable[[str, Rank], None]:
    """Called before each phase."""

    def before(phase: str, rank: Rank) -> None:
        if job["action"] == "census":
            census(phase, told)
        elif phase == job["phase"]:
            ACTIONS[job["action"]](job, rank, told)

    return before


def census(phase: str, told: Told) -> None:
    """How many calls of each kind every phase makes."""
    from faults.rank import Standin

    os.environ["STANDIN_FAIL"] = ",".join(f"{kind}:0:0" for kind in KINDS)
    seen = {kind: Standin().seen(index) for index, kind in enumerate(KINDS)}
    told.setdefault("census", {})[phase] = seen


def fail_call(job: Job, rank: Rank, told: Told) -> None:
    """Fail one of all CUDA calls, or of those that the method ``within`` ("module:Class.method") makes."""
    if "within" not in job:
        os.environ["STANDIN_FAIL"] = job["value"]
        return
    owner, method = found(job["within"])
    original = getattr(owner, method)

    def around(*arguments: Any, **more: Any) -> Any:
        os.environ["STANDIN_FAIL"] = job["value"]
        try:
            return original(*arguments, **more)
        finally:
            os.environ.pop("STANDIN_FAIL", None)

    setattr(owner, method, around)


def found(call: str) -> tuple[Any, str]:
    """What holds "module:Class.method" or "module:function", and the name that it has there."""
    module, _, path = call.partition(":")
    owner: Any = importlib.import_module(module)
    *names, method = path.split(".")
    for name in names:
        owner = getattr(owner, name)
    return owner, method


def shrink_vram(job: Job, rank: Rank, told: Told) -> None:
    """Another process takes all but ``value`` bytes of what is free."""
    import torch

    from sglang_uvm_offload.cuda.ops import device_ops

    torch.cuda.init()
    free, total = device_ops(0).memory_info(0)
    os.environ["STANDIN_VRAM"] = str(total - free + job["value"])
    told["injected"] = 1


def shrink_host_ram(job: Job, rank: Rank, told: Told) -> None:
    """``value``: the bytes that are left, or what reading them raises."""

    def answer() -> int:
        told["injected"] = 1
        if isinstance(job["value"], str):
            raise OSError(getattr(errno, job["value"]), os.strerror(getattr(errno, job["value"])), "/proc/meminfo")
        return job["value"]

    from sglang_uvm_offload.cpu import memory as emulated
    from sglang_uvm_offload.cuda import memory as unified

    emulated.host_available = unified.host_available = answer  # type: ignore[attr-defined]


def fill_cgroup(job: Job, rank: Rank, told: Told) -> None:
    """The memory cgroup is at its limit (``value``: "full"), or its files say something else."""
    from functools import partial

    from sglang_uvm_offload.cpu import memory as emulated
    from sglang_uvm_offload.cuda import memory as unified
    from sglang_uvm_offload.memory.host_ram import host_available

    folder = Path(job["folder"]) / "cgroup"
    folder.mkdir()
    limit, used = {"full": ("1000000", "1000000"), "over": ("1000000", "2000000"), "empty": ("", "")}[job["value"]]
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(used + "\n")
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text("0::/\n")
    shutil.copy("/proc/meminfo", folder / "proc" / "meminfo")
    reader = partial(host_available, folder / "proc", folder)
    emulated.host_available = unified.host_available = reader  # type: ignore[attr-defined]
    told["injected"] = 1


def limit_address_space(job: Job, rank: Rank, told: Told) -> None:
    """Mappings fail once ``value`` more bytes are mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    now = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + job["value"], resource.RLIM_INFINITY))
    told["injected"] = 1


def fail_memory(job: Job, rank: Rank, told: Told) -> None:
    """The ``k``-th ``call`` of the emulated memory fails."""
    from sglang_uvm_offload.cpu.memory import EmulatedMemory
    from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span

    original, count = getattr(EmulatedMemory, job["call"]), 0

    def failing(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == job["k"]:
            told["injected"] = 1
            raise ManagedMemoryError(job["call"], "an injected fault", Span(0, 0), job["value"])
        return original(*arguments, **more)

    setattr(EmulatedMemory, job["call"], failing)


SLOW_SECONDS = 5.0
ERRORS = {"MemoryError": MemoryError, "RuntimeError": RuntimeError, "SystemExit": SystemExit, "ValueError": ValueError}


def break_method(job: Job, rank: Rank, told: Told) -> None:
    """The ``k``-th call of the method ``call`` ("module:Class.method") raises, takes some seconds, or never returns."""
    owner, method = found(job["call"])
    original, count = getattr(owner, method), 0

    def broken(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count != job["k"]:
            return original(*arguments, **more)
        told["injected"] = 1
        if job["value"] == "hang":
            threading.Event().wait()
        if job["value"] == "slow":
            time.sleep(SLOW_SECONDS)
            return original(*arguments, **more)
        raise ERRORS[job["value"]]("an injected fault")

    setattr(owner, method, broken)
    if job["value"] == "hang":
        rank.hung = told["hung"] = True


def fail_files(job: Job, rank: Rank, told: Told) -> None:
    """Something is wrong where the profile is saved. A call that fails does so ``times`` times, or always."""
    folder, path, how = rank.profile_path.parent, rank.profile_path, job["value"]
    told["injected"] = 1
    if how == "folder gone":
        shutil.rmtree(folder)
    elif how == "folder is a file":
        shutil.rmtree(folder)
        folder.write_text("")
    elif how == "path is a folder":
        path.unlink(missing_ok=True)
        path.mkdir()
    elif how == "file of another kind":
        path.write_text("notes")
    elif how == "damaged file":
        path.write_bytes(b"PK\x03\x04 damaged")
    elif how == "size limit":
        limit_files(100)
    elif how == "no handles":
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, most))
    elif how == "locked by another":
        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    else:
        call, name = how.split(":")
        number, original, times = getattr(errno, name), getattr(os, call), itertools.count()

        def failing(*arguments: Any, **more: Any) -> Any:
            if next(times) >= job.get("times", math.inf):
                return original(*arguments, **more)
            raise OSError(number, os.strerror(number), str(path))

        setattr(os, call, failing)


def limit_files(nbytes: int) -> None:
    """A file may have so many bytes while a profile is written; before and after that the log goes on."""
    from sglang_uvm_offload.routing.profile import Profile

    write = Profile.write

    def limited(profile: Profile, file: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
        try:
            write(profile, file)
            file.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    Profile.write = limited  # type: ignore[method-assign]


def jump_clock(job: Job, rank: Rank, told: Told) -> None:
    """The time of day jumps by ``value`` seconds."""
    original = time.time
    time.time = lambda: original() + job["value"]  # type: ignore[assignment]
    time.time_ns = lambda: int(1e9 * time.time())  # type: ignore[assignment]
    told["injected"] = 1


def end_in_call(job: Job, rank: Rank, told: Told) -> None:
    """The process gets the signal ``value`` in the ``k``-th call of the method ``call`` ("module:Class.method" or
    "module:function")."""
    owner, method = found(job["call"])
    original, count = getattr(owner, method), 0

    def ended(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == job["k"]:
            told["injected"] = 1
            os.kill(os.getpid(), getattr(signal, job["value"]))
        return original(*arguments, **more)

    setattr(owner, method, ended)


def evict(job: Job, rank: Rank, told: Told) -> None:
    """The driver takes the VRAM of the first ``value`` resident blocks of each tensor for something else, or of its slots."""
    from sglang_uvm_offload.memory.layout import BLOCK_BYTES

    take = ctypes.CDLL("libcuda.so.1").standin_evict
    take.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for layer in rank.experts.layers:
        for tensor in layer.tensors:
            if job["value"] == "slots":
                slots = slots_behind(layer, tensor)
                addresses = range(slots.data_ptr(), slots.data_ptr() + slots.nbytes, BLOCK_BYTES)
            else:
                addresses = tensor.address + tensor.layout.blocks(tensor.resident)[: job["value"]]
            for address in addresses:
                take(int(address), BLOCK_BYTES)
    told["injected"] = 1


def slots_behind(layer: ExpertLayer, tensor: ExpertTensor) -> torch.Tensor:
    return layer.rows_from(tensor.address)[layer.pool.first_slot(layer.index) :]


def spoil(job: Job, rank: Rank, told: Told) -> None:
    """A byte of each expert changes (``value``: "experts"), or of each slot: no fault of the plugin's, but one that every judge
    must see."""
    tensors = [(layer, layer.tensors[0]) for layer in rank.experts.layers]
    if job["value"] == "experts":
        places = {(tensor.address, layer.num_experts) for layer, tensor in tensors}
    else:
        places = {(slots_behind(layer, tensor).data_ptr(), layer.pool.num_slots) for layer, tensor in tensors}
    for first, rows in places:
        for row in range(rows):
            ctypes.c_ubyte.from_address(first + row * tensors[0][1].layout.expert_bytes + 77).value ^= 1
    told["injected"] = 1


def write_weights(job: Job, rank: Rank, told: Told) -> None:
    """An update gives the experts other weights. ``value``: "told"; "untold": slots do not learn of it, which a judge must see;
    or, with ``within``, the CUDA call that fails after it."""
    if job["value"] == "untold":
        rank.slots.bytes_written = lambda: None  # type: ignore[method-assign]
    if "within" in job:
        fail_call(job, rank, told)
    rank.replace_weights()
    told["injected"] = 1


def nothing(job: Job, rank: Rank, told: Told) -> None:
    """What others are compared with."""


ACTIONS: dict[str, Action] = {
    "none": nothing,
    "cuda call": fail_call,
    "VRAM": shrink_vram,
    "host RAM": shrink_host_ram,
    "cgroup": fill_cgroup,
    "mmap": limit_address_space,
    "emulated memory": fail_memory,
    "thread": break_method,
    "files": fail_files,
    "clock": jump_clock,
    "signal": end_in_call,
    "eviction": evict,
    "spoil": spoil,
    "weights": write_weights,
}

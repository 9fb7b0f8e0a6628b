"""Tests unified memory on 2 MiB before a launch relies on it: advice, prefetches both ways, and reads by the GPU.

The attribute ``concurrentManagedAccess`` is not enough: sandboxes report it and still refuse the calls (gVisor before January
2026 refuses ``SetAccessedBy``). The test needs a CUDA context, which a launcher must not have when it starts its ranks. So this
file runs as a separate process. It uses cuda-python, which needs no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import DriverError, call_driver, check_shown, make_context, start_driver
from sglang_uvm_offload.files import child

NBYTES = 2 << 20
_TIMEOUT_SECONDS = 120
_Advice = driver.CUmem_advise
_Kind = driver.CUmemLocationType
# In cuda-python 12, these functions have a suffix.
_advise: Callable[..., Any] = getattr(driver, "cuMemAdvise_v2", driver.cuMemAdvise)
_prefetch: Callable[..., Any] = getattr(driver, "cuMemPrefetchAsync_v2", driver.cuMemPrefetchAsync)


@functools.cache
def canary_problems(devices: tuple[int, ...]) -> list[str]:
    """Why experts cannot be kept in unified memory of these GPUs, one line per failing GPU; empty if they can."""
    try:
        tried = child.run_module(__name__, *map(str, devices), seconds=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"unified memory is unusable: a test on 2 MiB did not return within {_TIMEOUT_SECONDS} s"]
    if tried.returncode != 0:
        reason = (tried.stderr.strip() or f"exit code {tried.returncode}").splitlines()[-1]
        return [f"unified memory is unusable: a test on 2 MiB failed: {reason}"]
    problems: list[str] = json.loads(tried.stdout.splitlines()[-1])
    return problems


def try_unified_memory(device: int) -> None:
    """Test unified memory of ``device``, creating a context. Raises ``DriverError`` with the first call that fails or the first
    read that returns wrong bytes."""
    make_context(device)
    gpu, host = _location(_Kind.CU_MEM_LOCATION_TYPE_DEVICE, device), _location(_Kind.CU_MEM_LOCATION_TYPE_HOST, 0)
    written = bytes(range(256)) * (NBYTES // 256)
    with _allocated("cuMemAllocManaged", NBYTES, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value) as managed:
        _call("cuMemAdvise(SetAccessedBy)", _advise, managed, NBYTES, _Advice.CU_MEM_ADVISE_SET_ACCESSED_BY, gpu)
        ctypes.memmove(int(managed), written, NBYTES)
        for place, name in ((host, "host RAM"), (gpu, "VRAM"), (host, "host RAM again")):
            _move(managed, place)
            _check(_read_by_gpu(managed), written, f"the GPU's read in {name}")
            _check(ctypes.string_at(int(managed), NBYTES), written, f"the CPU's read in {name}")


def _move(managed: Any, place: Any) -> None:
    _call("cuMemAdvise(SetPreferredLocation)", _advise, managed, NBYTES, _Advice.CU_MEM_ADVISE_SET_PREFERRED_LOCATION, place)
    _call("cuMemPrefetchAsync", _prefetch, managed, NBYTES, place, 0, 0)
    _call("cuCtxSynchronize", driver.cuCtxSynchronize)


def _read_by_gpu(managed: Any) -> bytes:
    """Read the range in place with a device-to-device copy, then copy the result to the host."""
    out = ctypes.create_string_buffer(NBYTES)
    with _allocated("cuMemAlloc", NBYTES) as plain:
        _call("cuMemcpyDtoD", driver.cuMemcpyDtoD, plain, managed, NBYTES)
        _call("cuMemcpyDtoH", driver.cuMemcpyDtoH, ctypes.addressof(out), plain, NBYTES)
    return out.raw


def _check(read: bytes, written: bytes, what: str) -> None:
    if read != written:
        raise DriverError(f"{what} returned wrong bytes")


def _location(kind: Any, number: int) -> Any:
    location = driver.CUmemLocation()
    location.type, location.id = kind, number
    return location


@contextmanager
def _allocated(name: str, *arguments: object) -> Iterator[Any]:
    memory = _call(name, getattr(driver, name), *arguments)
    try:
        yield memory
    finally:
        _call("cuMemFree", driver.cuMemFree, memory)


def _call(name: str, function: Callable[..., Any], *arguments: object) -> Any:
    return call_driver(function, *arguments, name=name)


def _main() -> None:
    problems = []
    for device in map(int, sys.argv[1:]):
        try:
            start_driver()
            check_shown(device)
        except DriverError as missing:
            problems.append(str(missing))
            continue
        try:
            try_unified_memory(device)
        except DriverError as refusal:
            problems.append(
                f"CUDA device {device} cannot keep experts in unified memory: in a test on 2 MiB, {refusal} (sandboxes such as "
                "gVisor before 2026 refuse these calls; use another container runtime, or the host)"
            )
    print(json.dumps(problems))


if __name__ == "__main__":
    _main()

"""CUDA driver queries: a GPU's architecture, its free memory, and why it cannot use unified memory.

The queries use cuda-python without creating a context, so a launcher may run them before it forks. Only the query for free
memory needs a context, for which this file runs as a separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver

from sglang_uvm_offload.files import child

_Attribute = driver.CUdevice_attribute
_QUERY_TIMEOUT_SECONDS = 120


class DriverError(RuntimeError):
    """A driver call failed. The message names the call and the driver's reason."""


def device_arch(device: int) -> str:
    """The GPU's architecture, for example "sm_90"."""
    start_driver()
    handle = call_driver(driver.cuDeviceGet, device)
    major = call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
    minor = call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
    return f"sm_{major}{minor}"


def device_problems(device: int) -> list[str]:
    """All reasons why experts cannot be kept in unified memory of this process's GPU ``device``; empty if they can."""
    import torch  # imported late: a process that only queries free memory does not need it

    if torch.version.cuda is None:
        return [f"PyTorch {torch.__version__} is built without CUDA; install a CUDA build"]
    try:
        start_driver()
        count = call_driver(driver.cuDeviceGetCount)
        if device >= count:
            return [_missing(device, count)]
        return _driver_problems(torch.version.cuda) + _memory_problems(device) + _confidential_problems()
    except DriverError as refusal:
        return [str(refusal)]


def problems_of(devices: Sequence[int]) -> list[str]:
    """``device_problems`` of all ``devices`` (ascending) without duplicates. Several missing devices share one line."""
    count = len(visible_gpus())
    there = [device for device in devices if device < count]
    absent = devices[len(there) :]
    if count == 0 or len(absent) < 2:
        return list(dict.fromkeys(problem for device in devices for problem in device_problems(device)))
    missing = f"CUDA devices {absent[0]} to {absent[-1]} do not exist: the driver shows {count}"
    return [missing, *problems_of(there)]


def visible_gpus() -> list[tuple[str, int]]:
    """The name and memory size in bytes of each GPU visible to this process; empty without a driver."""
    try:
        start_driver()
        handles = [call_driver(driver.cuDeviceGet, index) for index in range(call_driver(driver.cuDeviceGetCount))]
        names = [call_driver(driver.cuDeviceGetName, 256, handle) for handle in handles]
        return [
            (name.split(b"\0")[0].decode(), call_driver(driver.cuDeviceTotalMem, handle))  # the buffer is longer than the name
            for name, handle in zip(names, handles, strict=True)
        ]
    except DriverError:
        return []


def gpu_ids(devices: Sequence[int] | None = None) -> list[str]:
    """The UUIDs of ``devices``, by default of all GPUs visible to this process. Raises ``DriverError``."""
    start_driver()
    query = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)  # cuda-python 13 drops the _v2
    handles = [call_driver(driver.cuDeviceGet, index) for index in devices or range(call_driver(driver.cuDeviceGetCount))]
    return [bytes(call_driver(query, handle).bytes).hex() for handle in handles]


def integrated() -> bool:
    """Whether a visible GPU shares the host's memory, as in a DGX Spark; False without a driver."""
    try:
        start_driver()
        handles = [call_driver(driver.cuDeviceGet, index) for index in range(call_driver(driver.cuDeviceGetCount))]
        found = [call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, one) for one in handles]
    except DriverError:
        return False
    return any(found)


def free_vram(devices: Sequence[int]) -> list[int]:
    """Free VRAM in bytes of each GPU of ``devices``. Excludes the querying process's context."""
    try:
        queried = child.run_module(__name__, *map(str, devices), seconds=_QUERY_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise DriverError(f"querying free VRAM did not return within {_QUERY_TIMEOUT_SECONDS} s") from late
    if queried.returncode != 0:
        raise DriverError((queried.stderr.strip() or f"exit code {queried.returncode}").splitlines()[-1])
    free: list[int] = json.loads(queried.stdout.splitlines()[-1])
    return free


def relax_capture() -> None:
    """Let the calling thread wait for streams and events while another thread captures a graph. In a thread's default mode,
    such a wait would invalidate a capture in global mode, which torch uses (``cudaThreadExchangeStreamCaptureMode``)."""
    call_driver(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def check_shown(device: int) -> None:
    """Raise ``DriverError`` if this GPU is not visible to this process."""
    count = call_driver(driver.cuDeviceGetCount)
    if device >= count:
        raise DriverError(_missing(device, count))


def _missing(device: int, count: int) -> str:
    return f"CUDA device {device} does not exist: the driver shows {count}"


def make_context(device: int) -> None:
    """Create a context on ``device`` and keep it. Not for a launcher, which starts its ranks afterwards."""
    handle = call_driver(driver.cuDeviceGet, device)
    call_driver(driver.cuCtxSetCurrent, call_driver(driver.cuDevicePrimaryCtxRetain, handle))


def _free_vram_here(device: int) -> int:
    make_context(device)
    error, free, _ = driver.cuMemGetInfo()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"cuMemGetInfo failed: {_reason(error)}")
    return free


def _driver_problems(runtime: str) -> list[str]:
    """Whether the driver is too old. It supports CUDA runtimes of its own and earlier major versions."""
    version = call_driver(driver.cuDriverGetVersion)
    supported, needed = version // 1000, int(runtime.split(".")[0])
    if supported >= needed:
        return []
    return [
        f"the NVIDIA driver is too old: it supports CUDA {supported}.{version % 1000 // 10}, but PyTorch is built for CUDA "
        f"{runtime}; update the driver"
    ]


def _memory_problems(device: int) -> list[str]:
    handle = call_driver(driver.cuDeviceGet, device)
    if not call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, handle):
        return [f"CUDA device {device} does not support managed memory"]
    if not call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, handle):
        return [
            f"CUDA device {device} does not support concurrent managed access (concurrentManagedAccess is 0), as under WSL2, "
            "on Windows, and on some virtual GPUs"
        ]
    return []


def _confidential_problems() -> list[str]:
    """Confidential computing forbids the GPU to read host memory in place. Only NVML reports it."""
    try:
        from cuda.bindings import nvml
    except ImportError:  # cuda-python before 13.1
        return []
    try:
        nvml.init_v2()
        try:
            enabled = nvml.system_get_conf_compute_state().cc_feature
        finally:
            nvml.shutdown()
    except (RuntimeError, nvml.NvmlError):  # a driver without NVML or this query has no confidential computing
        return []
    return ["confidential computing is enabled: the GPU cannot read managed memory in host RAM"] if enabled else []


def start_driver() -> None:
    """Initialize the CUDA driver. Raises ``DriverError``."""
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError as missing:
        raise DriverError(f"no NVIDIA driver found: {missing}") from missing
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"cannot initialize the CUDA driver: cuInit: {_reason(error)}")


def call_driver(function: Callable[..., tuple[Any, ...]], *arguments: object, name: str = "") -> Any:
    """Call the driver and return the result. Raises ``DriverError`` with ``name`` or the function's own name."""
    error, *answer = function(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name or function.__name__} failed: {_reason(error)}")
    return answer[0] if answer else None


def _reason(error: driver.CUresult) -> str:
    found, text = driver.cuGetErrorString(error)
    return f"{error.name}: {text.decode()}" if found == driver.CUresult.CUDA_SUCCESS else error.name


def _main() -> None:
    try:
        start_driver()
        wanted = [int(word) for word in sys.argv[1:]]
        for device in wanted:
            check_shown(device)
        print(json.dumps([_free_vram_here(device) for device in wanted]))
    except DriverError as refusal:
        sys.exit(str(refusal))


if __name__ == "__main__":
    _main()

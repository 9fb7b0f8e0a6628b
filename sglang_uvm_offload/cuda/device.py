"""Queries to the CUDA driver: a GPU's architecture, its free memory, and every reason why it cannot serve unified memory.

The queries use cuda-python and create no context, so a launcher may make them before it forks. Only the query for free memory
needs a context, so this file runs as a program in a process of its own.
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
    """Such as "sm_90"."""
    start_driver()
    handle = call_driver(driver.cuDeviceGet, device)
    major = call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
    minor = call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
    return f"sm_{major}{minor}"


def device_problems(device: int) -> list[str]:
    """Every reason why experts cannot live in unified memory of this process's GPU ``device``; empty if they can."""
    import torch  # not at the top: a process that only queries free memory need not wait for it

    if torch.version.cuda is None:
        return [f"this PyTorch ({torch.__version__}) is built without CUDA"]
    try:
        start_driver()
        count = call_driver(driver.cuDeviceGetCount)
        if device >= count:
            return [f"there is no CUDA device {device}: the driver shows {count}"]
        return _driver_problems(torch.version.cuda) + _memory_problems(device) + _confidential_problems()
    except DriverError as refusal:
        return [str(refusal)]


def problems_of(devices: Sequence[int]) -> list[str]:
    """``device_problems`` of all ``devices``, which ascend, each once; several that are not there on one line."""
    count = len(visible_gpus())
    there = [device for device in devices if device < count]
    absent = devices[len(there) :]
    if count == 0 or len(absent) < 2:
        return list(dict.fromkeys(problem for device in devices for problem in device_problems(device)))
    missing = f"there are no CUDA devices {absent[0]} to {absent[-1]}: the driver shows {count}"
    return [missing, *problems_of(there)]


def visible_gpus() -> list[tuple[str, int]]:
    """The name and the bytes of memory of each GPU that this process sees; empty without a driver."""
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
    """The UUIDs of ``devices``, of all GPUs that this process sees by default. Raises ``DriverError``."""
    start_driver()
    query = getattr(driver, "cuDeviceGetUuid_v2", driver.cuDeviceGetUuid)  # cuda-python 13 gives the one the other's name
    handles = [call_driver(driver.cuDeviceGet, index) for index in devices or range(call_driver(driver.cuDeviceGetCount))]
    return [bytes(call_driver(query, handle).bytes).hex() for handle in handles]


def integrated() -> bool:
    """Whether a GPU that this process sees has no memory but the host's, as in a DGX Spark; False without a driver."""
    try:
        start_driver()
        handles = [call_driver(driver.cuDeviceGet, index) for index in range(call_driver(driver.cuDeviceGetCount))]
        found = [call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED, one) for one in handles]
    except DriverError:
        return False
    return any(found)


def free_vram(devices: Sequence[int]) -> list[int]:
    """Bytes of VRAM that are free on each GPU of ``devices``, not counting the context of the querying process."""
    try:
        queried = child.run_module(__name__, *map(str, devices), seconds=_QUERY_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise DriverError(f"the query for free VRAM did not return within {_QUERY_TIMEOUT_SECONDS} s") from late
    if queried.returncode != 0:
        raise DriverError((queried.stderr.strip() or f"exit code {queried.returncode}").splitlines()[-1])
    free: list[int] = json.loads(queried.stdout.splitlines()[-1])
    return free


def relax_capture() -> None:
    """Let the calling thread wait for streams and events while another one captures a graph: in the mode that threads start in,
    that would end a capture in global mode, which is torch's (``cudaThreadExchangeStreamCaptureMode``)."""
    call_driver(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def check_shown(device: int) -> None:
    """Raises ``DriverError`` if this process sees no such GPU."""
    count = call_driver(driver.cuDeviceGetCount)
    if device >= count:
        raise DriverError(f"there is no CUDA device {device}: the driver shows {count}")


def make_context(device: int) -> None:
    """Make a context on ``device`` and keep it; not in a launcher, which starts its ranks later."""
    handle = call_driver(driver.cuDeviceGet, device)
    call_driver(driver.cuCtxSetCurrent, call_driver(driver.cuDevicePrimaryCtxRetain, handle))


def _free_vram_here(device: int) -> int:
    make_context(device)
    error, free, _ = driver.cuMemGetInfo()
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"cuMemGetInfo failed: {_reason(error)}")
    return free


def _driver_problems(runtime: str) -> list[str]:
    """A driver supports the CUDA runtimes of its own and of earlier major versions."""
    version = call_driver(driver.cuDriverGetVersion)
    supported, needed = version // 1000, int(runtime.split(".")[0])
    if supported >= needed:
        return []
    return [
        f"the NVIDIA driver is too old: it supports CUDA {supported}.{version % 1000 // 10}, and this PyTorch is built "
        f"for CUDA {runtime}"
    ]


def _memory_problems(device: int) -> list[str]:
    handle = call_driver(driver.cuDeviceGet, device)
    if not call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, handle):
        return [f"CUDA device {device} has no managed memory"]
    if not call_driver(driver.cuDeviceGetAttribute, _Attribute.CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, handle):
        return [
            f"CUDA device {device} cannot use managed memory while the CPU does (concurrentManagedAccess is 0), as under "
            "WSL2, on Windows, and on some virtual GPUs"
        ]
    return []


def _confidential_problems() -> list[str]:
    """Under confidential computing the GPU may not read host memory in place. Only NVML reports it."""
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
    except (RuntimeError, nvml.NvmlError):  # a driver without NVML or without the query has no confidential computing
        return []
    return ["confidential computing is on: the GPU cannot read managed memory in host RAM in place"] if enabled else []


def start_driver() -> None:
    """Raises ``DriverError``."""
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError as missing:
        raise DriverError(f"there is no NVIDIA driver on this machine: {missing}") from missing
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"the CUDA driver does not start: cuInit: {_reason(error)}")


def call_driver(function: Callable[..., tuple[Any, ...]], *arguments: object, name: str = "") -> Any:
    """What the call returns. Raises ``DriverError``, which names the call as ``name``, or by its own name."""
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

"""The driver's access counters, which on coherent machines migrate pages that the GPU reads often.

Expert pages stay where they are: a notification moves a page to its preferred location, where it is already
(``block_select_processor_residency``, ``uvm_va_block.c``). But the driver handles one for each 256 reads of a region, which
takes a thread of the kernel and the locks that moves need. (``uvm_gpu_access_counters.c``, NVIDIA's open kernel modules,
595.45.04.)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import DriverError, call_driver

SYSTEM = Path("/sys")
PARAMETER = "uvm_perf_access_counter_migration_enable"

_COHERENT = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES


def warning(devices: Sequence[int], system: Path | None = None) -> str | None:
    """One where the counters migrate pages on a GPU of ``devices``: by default on coherent machines, elsewhere if the module's
    parameter says so. A driver that does not know of coherence has none."""
    try:
        setting = int(((system or SYSTEM) / "module/nvidia_uvm/parameters" / PARAMETER).read_text())
    except (OSError, ValueError):
        return None  # an older module, or one without this parameter
    if setting == 0 or (setting < 0 and not any(map(_is_coherent, devices))):
        return None
    return (
        f"the driver counts reads of host memory and migrates pages by them ({PARAMETER} is {setting}): experts stay where "
        f"they are, but each notification takes time; to turn it off, load the module with: options nvidia-uvm {PARAMETER}=0"
    )


def _is_coherent(device: int) -> bool:
    try:
        return bool(call_driver(driver.cuDeviceGetAttribute, _COHERENT, call_driver(driver.cuDeviceGet, device)))
    except DriverError:
        return False

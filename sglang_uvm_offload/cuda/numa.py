"""The NUMA node of a GPU. Host pages on another node are read over the link between the sockets too.

Without a named node the driver puts host pages on the node of the thread that first touches them, which need not be the GPU's.
"""

from __future__ import annotations

from pathlib import Path

from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import DriverError, call_driver, start_driver

SYSTEM = Path("/sys")


def nearest_host_node(device: int, system: Path | None = None) -> int | None:
    """The node that is closest to the GPU: the driver's answer, else that of its PCI device. None on a machine with one node,
    and where nobody knows."""
    system = system or SYSTEM
    if not _several_nodes(system):
        return None
    try:
        start_driver()
        handle = call_driver(driver.cuDeviceGet, device)
        return next((node for node in (_of_driver(handle), _of_pci_device(handle, system)) if node >= 0), None)
    except DriverError:
        return None


def _several_nodes(system: Path) -> bool:
    try:
        online = (system / "devices/system/node/online").read_text().strip()
    except OSError:
        return False
    return not online.isdecimal() and bool(online)  # such as 0-1, where one node is 0


def _of_driver(handle: object) -> int:
    attribute = getattr(driver.CUdevice_attribute, "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID", None)  # not in early CUDA 12
    if attribute is None:
        return -1
    try:
        return int(call_driver(driver.cuDeviceGetAttribute, attribute, handle))
    except DriverError:
        return -1


def _of_pci_device(handle: object, system: Path) -> int:
    name = call_driver(driver.cuDeviceGetPCIBusId, 32, handle)
    try:
        return int((system / "bus/pci/devices" / name.split(b"\0")[0].decode().lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return -1

"""The NUMA node of a GPU. Reads of host pages on another node also cross the link between the sockets.

Without a preferred node, the driver puts host pages on the node of the thread that first touches them, perhaps not the GPU's.

The driver tries a preferred node first. If it is full, the driver silently uses any other: it first allocates a block on that
node alone (``__GFP_THISNODE``, ``uvm_pmm_sysmem.c:448``), then without naming a node (``block_alloc_cpu_chunk``,
``uvm_va_block.c:1574-1580``, and from then on for the rest of the block, 1946-1950; NVIDIA's open kernel modules, 580.95.05).
So whether experts fit depends on the host RAM of all nodes. The node's own RAM only decides how close they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import DriverError, call_driver, start_driver
from sglang_uvm_offload.cuda.pci import bus_id
from sglang_uvm_offload.memory.host_ram import nodes_available
from sglang_uvm_offload.units import size

SYSTEM, PROC = Path("/sys"), Path("/proc")


def nearest_host_node(device: int) -> int | None:
    """The NUMA node closest to the GPU, according to the driver, else to its PCI device. None if unknown, or if the machine has
    only one node."""
    if not _several_nodes():
        return None
    try:
        start_driver()
        handle = call_driver(driver.cuDeviceGet, device)
        return next((node for node in (_of_driver(handle), _of_pci_device(handle)) if node >= 0), None)
    except DriverError:
        return None


def crowded(offloaded: Mapping[int, int]) -> list[str]:
    """A warning per node that cannot hold everything ``offloaded`` to it (bytes by GPU)."""
    available = nodes_available(PROC, SYSTEM / "devices/system/node")
    gpus: dict[int, list[int]] = defaultdict(list)
    for gpu in offloaded:
        node = nearest_host_node(gpu)
        if node is not None and available:
            gpus[node].append(gpu)
    needed = {node: sum(offloaded[gpu] for gpu in of) for node, of in gpus.items()}
    return [
        f"NUMA node {node}, nearest to GPU {', '.join(map(str, gpus[node]))}, has only {size(available.get(node, 0))} "
        f"available for {size(nbytes)} of offloaded weights: the driver puts the rest on other nodes, which are read over the "
        "link between the sockets"
        for node, nbytes in sorted(needed.items())
        if nbytes > available.get(node, 0)
    ]


def _several_nodes() -> bool:
    try:
        online = (SYSTEM / "devices/system/node/online").read_text().strip()
    except OSError:
        return False
    return not online.isdecimal() and bool(online)  # "0-1" for two nodes, "0" for one


def _of_driver(handle: object) -> int:
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    try:
        return int(call_driver(driver.cuDeviceGetAttribute, attribute, handle))
    except DriverError:
        return -1


def _of_pci_device(handle: object) -> int:
    try:
        return int((SYSTEM / "bus/pci/devices" / bus_id(handle) / "numa_node").read_text())
    except (OSError, ValueError):
        return -1

"""The NUMA node of a GPU. Host pages on another node are read over the link between the sockets too.

Without a named node the driver puts host pages on the node of the thread that first touches them, which need not be the GPU's.

A named node is where the driver tries first. Where that node is full, it puts the pages on any other, and reports no error: the
first try of a block is for that node alone (``__GFP_THISNODE``, ``uvm_pmm_sysmem.c:448``), and the others name no node
(``block_alloc_cpu_chunk``, ``uvm_va_block.c:1574-1580``, and from then on for the rest of the block, 1946-1950; NVIDIA's open
kernel modules, 580.95.05). So the host RAM of all nodes decides whether experts fit, and a node's only how near they lie.
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
    """The node that is closest to the GPU: the driver's answer, else that of its PCI device. None on a machine with one node,
    and where nobody knows."""
    if not _several_nodes():
        return None
    try:
        start_driver()
        handle = call_driver(driver.cuDeviceGet, device)
        return next((node for node in (_of_driver(handle), _of_pci_device(handle)) if node >= 0), None)
    except DriverError:
        return None


def crowded(offloaded: Mapping[int, int]) -> list[str]:
    """A line for each node that has no room for all that is ``offloaded`` to it: bytes by GPU."""
    available = nodes_available(PROC, SYSTEM / "devices/system/node")
    gpus: dict[int, list[int]] = defaultdict(list)
    for gpu in offloaded:
        node = nearest_host_node(gpu)
        if node is not None and available:
            gpus[node].append(gpu)
    needed = {node: sum(offloaded[gpu] for gpu in of) for node, of in gpus.items()}
    return [
        f"NUMA node {node} is nearest to GPU {', '.join(map(str, gpus[node]))} and has {size(available.get(node, 0))} "
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
    return not online.isdecimal() and bool(online)  # such as 0-1, where one node is 0


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

"""What sysfs shows of the way from host memory to the GPUs, and what of it slows reads of offloaded experts."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import DriverError, call_driver

SYSTEM = Path("/sys")


def bus_id(handle: object) -> str:
    """The name in sysfs of the PCI device of a GPU, a handle of the driver. Raises ``DriverError``."""
    name: bytes = call_driver(driver.cuDeviceGetPCIBusId, 32, handle)
    return name.split(b"\0")[0].decode().lower()


def bus_ids(devices: Iterable[int]) -> dict[int, str]:
    """The same by the number of the GPU, without those that the driver does not name."""
    found = {}
    for device in devices:
        with contextlib.suppress(DriverError):  # only what sysfs shows of the GPU is not known then
            found[device] = bus_id(call_driver(driver.cuDeviceGet, device))
    return found


def warnings(gpus: Mapping[int, str], system: Path | None = None) -> list[str]:
    """One line for each thing that slows reads of host memory by ``gpus`` (``bus_ids``). What sysfs does not show is taken to
    be fine."""
    system = system or SYSTEM
    return [*_shared_links(gpus, system), *_translated(gpus, system)]


def _shared_links(gpus: Mapping[int, str], system: Path) -> list[str]:
    """GPUs behind one root port, as those of one PCIe switch are."""
    by_port: dict[str, list[int]] = defaultdict(list)
    for gpu, name in gpus.items():
        # A link to .../devices/pci0000:40/0000:40:01.0/0000:41:00.0/...: a host bridge, its root port, and what is behind it.
        way = (system / "bus/pci/devices" / name).resolve().parts
        bridges = [i for i, part in enumerate(way[:-1]) if part.startswith("pci") and ":" in part]
        by_port[way[bridges[0] + 1] if bridges else name].append(gpu)
    return [
        f"GPUs {_listed(sharing)} share the PCIe link of root port {port}: when {'both' if len(sharing) == 2 else 'all'} read "
        "offloaded experts, they divide its rate between them, unless it is wider than theirs"
        for port, sharing in sorted(by_port.items())
        if len(sharing) > 1
    ]


def _translated(gpus: Mapping[int, str], system: Path) -> list[str]:
    """Types of groups: Documentation/ABI/testing/sysfs-kernel-iommu_groups of Linux."""
    by_type: dict[str, list[int]] = defaultdict(list)
    for gpu, name in gpus.items():
        by_type[_text(system / "bus/pci/devices" / name / "iommu_group" / "type")].append(gpu)
    return [
        f"the IOMMU translates reads of host memory by GPU {_listed(translated)} (its group has type {kind}), which takes "
        "longer where host pages are small: boot with iommu=pt, unless virtual machines get these GPUs"
        for kind, translated in sorted(by_type.items())
        if kind.startswith("DMA")
    ]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _listed(gpus: list[int]) -> str:
    return ", ".join(map(str, sorted(gpus)))

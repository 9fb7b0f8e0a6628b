"""The PCIe path between host memory and the GPUs according to sysfs, and what slows reads of offloaded experts on it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cuda.bindings import driver

from sglang_uvm_offload.cuda.device import DriverError, call_driver

SYSTEM = Path("/sys")


def bus_id(handle: object) -> str:
    """The sysfs name of a GPU's PCI device. ``handle`` is the driver's. Raises ``DriverError``."""
    name: bytes = call_driver(driver.cuDeviceGetPCIBusId, 32, handle)
    return name.split(b"\0")[0].decode().lower()


def bus_ids(devices: Iterable[int]) -> dict[int, str]:
    """``bus_id`` by GPU index, without GPUs that the driver does not name."""
    found = {}
    for device in devices:
        with contextlib.suppress(DriverError):  # then only the sysfs checks of this GPU are missing
            found[device] = bus_id(call_driver(driver.cuDeviceGet, device))
    return found


def warnings(gpus: Mapping[int, str], system: Path | None = None) -> list[str]:
    """One line for each cause of slow reads of host memory by ``gpus`` (``bus_ids``). What sysfs does not show is assumed to be
    fine."""
    system = system or SYSTEM
    return [*_shared_links(gpus, system), *_translated(gpus, system)]


def _shared_links(gpus: Mapping[int, str], system: Path) -> list[str]:
    """GPUs behind one root port, for example on one PCIe switch."""
    by_port: dict[str, list[int]] = defaultdict(list)
    for gpu, name in gpus.items():
        # A link to .../devices/pci0000:40/0000:40:01.0/0000:41:00.0/...: a host bridge, its root port, and the devices behind.
        way = (system / "bus/pci/devices" / name).resolve().parts
        bridges = [i for i, part in enumerate(way[:-1]) if part.startswith("pci") and ":" in part]
        by_port[way[bridges[0] + 1] if bridges else name].append(gpu)
    return [
        f"GPUs {_listed(sharing)} share the PCIe link of root port {port}: when {'both' if len(sharing) == 2 else 'all'} read "
        "offloaded experts, they split its bandwidth, unless it is wider than theirs"
        for port, sharing in sorted(by_port.items())
        if len(sharing) > 1
    ]


def _translated(gpus: Mapping[int, str], system: Path) -> list[str]:
    """GPUs behind a translating IOMMU. Linux documents the group types in
    Documentation/ABI/testing/sysfs-kernel-iommu_groups."""
    by_type: dict[str, list[int]] = defaultdict(list)
    for gpu, name in gpus.items():
        by_type[_text(system / "bus/pci/devices" / name / "iommu_group" / "type")].append(gpu)
    return [
        f"the IOMMU translates reads of host memory by GPU {_listed(translated)} (its group has type {kind}), which is slow "
        "with small host pages: boot with iommu=pt, unless these GPUs are passed to virtual machines"
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

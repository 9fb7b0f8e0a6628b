"""The way from host memory to GPUs, as a made-up sysfs shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_uvm_offload.cuda import pci
from sglang_uvm_offload.cuda.device import DriverError
from sglang_uvm_offload.cuda.pci import warnings


class Sysfs:
    def __init__(self, folder: Path):
        self.folder = folder
        self.gpus: dict[int, str] = {}

    def gpu(self, way: str, group: str | None = None) -> Sysfs:
        """One whose device lies at the end of ``way``, in an IOMMU group of this type."""
        name = way.rsplit("/", 1)[-1]
        device = self.folder / "devices" / way
        device.mkdir(parents=True)
        links = self.folder / "bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        os.symlink(os.path.relpath(device, links), links / name)
        if group is not None:
            (device / "iommu_group").mkdir()
            (device / "iommu_group/type").write_text(group + "\n")
        self.gpus[len(self.gpus)] = name
        return self

    def warnings(self) -> list[str]:
        return warnings(self.gpus, self.folder)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


SWITCH = "pci0000:40/0000:40:01.0/0000:41:00.0"


def test_gpus_behind_one_switch_share_its_link(sysfs: Sysfs) -> None:
    sysfs.gpu(f"{SWITCH}/0000:42:00.0/0000:43:00.0").gpu(f"{SWITCH}/0000:42:01.0/0000:44:00.0")
    sysfs.gpu("pci0000:80/0000:80:01.0/0000:81:00.0")
    (told,) = sysfs.warnings()
    assert told.startswith("GPUs 0, 1 share the PCIe link of root port 0000:40:01.0: when both")
    sysfs.gpu(f"{SWITCH}/0000:42:02.0/0000:45:00.0")
    (told,) = sysfs.warnings()
    assert told.startswith("GPUs 0, 1, 3 share the PCIe link of root port 0000:40:01.0: when all")


def test_gpus_with_ports_of_their_own_share_nothing(sysfs: Sysfs) -> None:
    """Two ports of one host bridge, and a virtual machine's flat bus."""
    sysfs.gpu("pci0000:40/0000:40:01.0/0000:41:00.0").gpu("pci0000:40/0000:40:03.0/0000:45:00.0")
    sysfs.gpu("pci0000:00/0000:00:05.0").gpu("pci0000:00/0000:00:06.0")
    assert sysfs.warnings() == []


@pytest.mark.parametrize(("group", "slow"), [("DMA", True), ("DMA-FQ", True), ("identity", False), (None, False)])
def test_a_translating_iommu_is_named_with_the_remedy(sysfs: Sysfs, group: str | None, slow: bool) -> None:
    told = sysfs.gpu("pci0000:40/0000:40:01.0/0000:41:00.0", group).warnings()
    assert len(told) == slow
    assert all(f"type {group})" in line and "iommu=pt" in line for line in told)


def test_a_gpu_that_the_driver_does_not_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(function: object, *arguments: object) -> object:
        if arguments == (1,):
            raise DriverError("no such device")
        return arguments[0] if len(arguments) == 1 else b"0000:AB:00.0\0\0"

    monkeypatch.setattr(pci, "call_driver", call)
    assert pci.bus_ids([0, 1]) == {0: "0000:ab:00.0"}


def test_what_sysfs_does_not_show_is_taken_to_be_fine(tmp_path: Path) -> None:
    assert warnings({0: "0000:ab:00.0", 1: "0000:ac:00.0"}, tmp_path) == []

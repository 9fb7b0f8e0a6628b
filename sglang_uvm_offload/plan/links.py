"""Published rates of the links between GPUs and host memory, in 1e9 bytes a second."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """``rate``: a copy engine's rate over PCIe, which is below nominal, or NVLink-C2C's nominal rate in one direction.
    ``slowest``: the slowest published rate of a machine of this kind; 0 if none was found. Each has its ``source``."""

    rate: float
    slowest: float
    source: str
    slowest_source: str = ""


PCIE4 = Link(
    25.0,
    16.5,
    "25 GB/s assumed for PCIe 4 x16 (reported: 25.1 on an A100, https://github.com/NVIDIA/nvbandwidth/issues/42)",
    "a kernel that reads 20 GiB on an A100, https://github.com/NVIDIA/nvbandwidth/issues/42",
)
PCIE5 = Link(
    55.0,
    35.0,
    "55 GB/s for PCIe 5 x16 (54.5 measured on an H200)",
    "kernels on each GPU of a machine with eight H100 (writes reach 53), reported to be similar on H20 and H800, "
    "https://github.com/NVIDIA/nvbandwidth/issues/24",
)
"""Measured on an H200: 54.5 in copies of 64 MiB, 55.4 in one of 1 GiB (GPU_STATUS.md)."""
GH200 = Link(
    450,
    342,
    "NVLink-C2C, 900 GB/s in both directions together (nominal)",
    "a kernel's copies, https://github.com/NVIDIA/nvbandwidth/issues/23",
)
# One Grace has two GPUs: each gets half of the link.
GB200 = Link(
    225,
    168.6,
    "NVLink-C2C, 900 GB/s in both directions together, for the two GPUs of a superchip (nominal)",
    "copy engines of four GB300 at once, https://github.com/NVIDIA/Megatron-LM/issues/6491",
)
# The link (600 GB/s in both directions) is wider than the memory, so reads of host memory run at the memory's rate.
GB10 = Link(273, 0, "NVLink-C2C to one memory of 273 GB/s that GPU and CPU share (nominal)")

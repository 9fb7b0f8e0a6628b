"""A machine to plan for: the one there is, one of a few well-known ones, or one told by its figures."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.host_ram import host_available

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. ``memory_mib`` is what nvidia-smi shows as its total; rates are in 1e9 bytes a second.

    ``link_gbps`` is what a copy engine reaches over the GPU's link to host memory, below the link's nominal rate;
    ``tflops`` is for dense bfloat16 with accumulation in float32. ``source`` says where the figures are from.
    """

    memory_mib: int
    hbm_gbps: float
    link_gbps: float
    tflops: float
    source: str


_PCIE4 = "link: 25.1 GB/s was reported for an A100 on PCIe 4 x16"
_PCIE5 = "link: 56 GB/s was reported for a copy engine on PCIe 5 x16"

GPUS = {
    "H20": Gpu(
        97871, 4000, 55, 148, f"https://willitrunai.com/es/gpus/h20-96gb; memory as nvidia-smi on an H20 shows it; {_PCIE5}"
    ),
    "H200": Gpu(
        143771,
        4800,
        55,
        989,
        f"https://lzwjava.github.io/nvidia-h200-gpu-specs-en (1979 with sparsity: half of it); memory as nvidia-smi; {_PCIE5}",
    ),
    "4090": Gpu(
        24564, 1008, 25, 165, f"https://waredb.com/processor/nvidia-geforce-rtx-4090; memory as nvidia-smi shows it; {_PCIE4}"
    ),
    "5090": Gpu(
        32607,
        1792,
        55,
        209,
        "https://www.spheron.network/blog/nvidia-rtx-5090-specs/ (838 with sparsity and float16 accumulation: a quarter); "
        f"memory as nvidia-smi shows it; {_PCIE5}",
    ),
}

PRESET_HOST_GIB = {"8xH20": 1500, "4x4090": 512, "1xH200": 512, "1x5090": 192}
"""Host RAM that presets come with where ``--host-gb`` gives none: assumed, such machines are sold with less and more."""


class MachineError(ValueError):
    """A description of a machine that names none. The message says what to give."""


@dataclass(frozen=True)
class Machine:
    """``gpus`` equal GPUs and the host RAM that they share. Bytes, and 1e9 bytes a second."""

    name: str
    gpus: int
    vram_bytes: int
    """Of one GPU, as nvidia-smi shows it."""
    host_bytes: int
    """That this server may take: what is available, where it is this machine."""
    link_gbps: float
    hbm_gbps: float
    tflops: float
    source: str


def preset(name: str) -> Machine:
    """``8xH20``, or any other count of a known GPU."""
    match = re.fullmatch(r"(\d{1,3})x(\w+)", name)
    kind = GPUS.get(match.group(2).upper()) if match else None
    if match is None or kind is None or not int(match.group(1)):
        raise MachineError(
            f"{name!r} is none of {', '.join(PRESET_HOST_GIB)}; a preset is a count and one of {', '.join(GPUS)}"
        )
    gpus = int(match.group(1))
    host = PRESET_HOST_GIB.get(name, 128 * gpus)
    return Machine(
        name,
        gpus,
        kind.memory_mib << 20,
        host * GIB,
        kind.link_gbps,
        kind.hbm_gbps,
        kind.tflops,
        f"{kind.source}; host RAM of {host} GiB assumed",
    )


def here() -> Machine:
    """This machine. Rates are 0 where its GPU is not in ``GPUS``. Raises ``MachineError`` where there is no GPU."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise MachineError("this machine has no CUDA GPU: name one with --machine, or with --gpus, --vram-gb and --host-gb")
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    words = re.split(r"\W+", properties[0].name)
    known = next((gpu for name, gpu in GPUS.items() if name in words), None)
    return Machine(
        f"{count} x {properties[0].name}",
        count,
        min(p.total_memory for p in properties),
        host_available(),
        known.link_gbps if known else 0,
        known.hbm_gbps if known else 0,
        known.tflops if known else 0,
        "this machine" + (f"; rates: {known.source}" if known else ""),
    )


def describe(
    base: Machine | None,
    *,
    gpus: int | None,
    vram_gb: float | None,
    host_gb: float | None,
    link_gbps: float | None,
    hbm_gbps: float | None,
    tflops: float | None,
) -> Machine:
    """``base`` with the given figures (GiB, and 1e9 bytes a second) in place of its own; without one, all are to be given."""
    given: dict[str, Any] = {
        "gpus": gpus,
        "vram_bytes": None if vram_gb is None else int(vram_gb * GIB),
        "host_bytes": None if host_gb is None else int(host_gb * GIB),
        "link_gbps": link_gbps,
        "hbm_gbps": hbm_gbps,
        "tflops": tflops,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if base is None:
        base = Machine("given by its figures", 0, 0, 0, 0, 0, 0, "given")
    elif values:
        base = dataclasses.replace(base, name=f"{base.name}, adjusted", source=f"{base.source}; as given: {', '.join(values)}")
    machine = dataclasses.replace(base, **values)
    flags = ("--gpus", "--vram-gb", "--host-gb", "--link-gbps", "--hbm-gbps", "--tflops")
    missing = [flag for flag, name in zip(flags, given, strict=True) if not getattr(machine, name) > 0]
    if missing:
        raise MachineError(f"{', '.join(missing)}: not known of this machine; give numbers above 0")
    return machine

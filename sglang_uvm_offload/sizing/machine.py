"""A machine to plan for: this one, a preset, or one given by its figures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.memory.host_ram import host_available

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. ``memory_mib`` is the total that nvidia-smi shows; rates are in 1e9 bytes a second.

    ``link_gbps`` is the rate of a copy engine over the GPU's link to host memory, below the link's nominal rate; ``tflops`` is
    for dense bfloat16 with accumulation in float32. ``source`` cites the figures.
    """

    memory_mib: int
    hbm_gbps: float
    link_gbps: float
    tflops: float
    source: str


PCIE4_GBPS = 25.0
PCIE5_GBPS = 55.0
"""The rate of a copy engine over 16 lanes: assumed wherever the link's rate was neither given nor measured. Measured on an H200
over PCIe 5: 54.5 in copies of 64 MiB, 55.4 in one of 1 GiB (GPU_STATUS.md); reported over PCIe 4: 25.1 GB/s on an A100
(https://github.com/NVIDIA/nvbandwidth/issues/42, a kernel's copies). NVIDIA states the nominal rate of the lanes, which is
higher."""
_LINK4 = f"link: {PCIE4_GBPS:g} GB/s assumed for PCIe 4 x16 (reported: 25.1 on an A100)"
_LINK5 = f"link: {PCIE5_GBPS:g} GB/s for PCIe 5 x16 (54.5 measured on an H200)"

# Rates are NVIDIA's where it publishes them, and dense: half of a figure "with sparsity". Memory is the total that nvidia-smi
# shows, which is undocumented and below the nominal size of the card.
GPUS = {
    # No specification of the H20 by NVIDIA was found; these figures are third-party.
    "H20": Gpu(97871, 4000, PCIE5_GBPS, 148, f"not NVIDIA's own: https://willitrunai.com/es/gpus/h20-96gb; {_LINK5}"),
    # BFLOAT16 Tensor Core of the H200 SXM: 1,979 TFLOPS, with sparsity.
    "H200": Gpu(
        143771, 4800, PCIE5_GBPS, 989, f"NVIDIA H200 Tensor Core GPU: https://www.nvidia.com/en-us/data-center/h200/; {_LINK5}"
    ),
    # Appendix A, Table 2: peak BF16 Tensor TFLOPS with FP32 accumulate 165.2.
    "4090": Gpu(
        24564,
        1008,
        PCIE4_GBPS,
        165,
        "NVIDIA Ada GPU Architecture: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf; "
        f"{_LINK4}",
    ),
    # Appendix A, Table 3: peak BF16 Tensor TFLOPS with FP32 accumulate 209.5.
    "5090": Gpu(
        32607,
        1792,
        PCIE5_GBPS,
        209,
        "NVIDIA RTX Blackwell GPU Architecture: "
        f"https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf; {_LINK5}",
    ),
}

PRESET_HOST_GIB = {"8xH20": 1500, "4x4090": 512, "1xH200": 512, "1x5090": 192}
"""Host RAM of presets without ``--host-gb``: assumed; such machines are sold with less and with more."""


class MachineError(ValueError):
    """An invalid description of a machine. The message names what to give."""


@dataclass(frozen=True)
class Machine:
    """``gpus`` equal GPUs and the host RAM that they share. Bytes, and 1e9 bytes a second."""

    name: str
    gpus: int
    vram_bytes: int
    """Total of one GPU, as nvidia-smi shows it."""
    host_bytes: int
    """Host RAM that this server may take; for this machine, what is available now."""
    link_gbps: float
    hbm_gbps: float
    tflops: float
    source: str


def preset(name: str) -> Machine:
    """The machine named ``8xH20``, or any other count of a known GPU."""
    match = re.fullmatch(r"(\d{1,3})x(\w+)", name)
    kind = GPUS.get(match.group(2).upper()) if match else None
    if match is None or kind is None or not int(match.group(1)):
        raise MachineError(
            f"--machine {name!r}: is none of {', '.join(PRESET_HOST_GIB)}; must be a count and one of {', '.join(GPUS)}"
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


def of_gpus(gpus: Sequence[tuple[str, int]]) -> Machine:
    """This machine, from the name and the bytes of each of its GPUs. Rates are 0 if the first is not in ``GPUS``. Raises
    ``MachineError`` if there is no GPU."""
    if not gpus:
        raise MachineError("this machine has no CUDA GPU: name one with --machine, or with --gpus, --vram-gb and --host-gb")
    name = gpus[0][0]
    words = re.split(r"\W+", name)
    known = next((gpu for word, gpu in GPUS.items() if word in words), None)
    return Machine(
        f"{len(gpus)} x {name}",
        len(gpus),
        min(nbytes for _, nbytes in gpus),
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
    """``base`` with the given figures (GiB, and 1e9 bytes a second) in place of its own. Without ``base``, all are required."""
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
        raise MachineError(f"{', '.join(missing)}: not known for this machine; give numbers above 0")
    return machine

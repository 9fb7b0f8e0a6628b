"""A machine to plan for: this one, a preset, or one given by its figures."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.sizing.links import GB10, GB200, GH200, PCIE4, PCIE5, Link

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. ``memory_mib`` is the total that nvidia-smi shows; rates are in 1e9 bytes a second.

    ``host_gbps`` is the nominal rate of the host memory of one GPU, 0 where it belongs to the host and not to the GPU.
    ``tflops`` is for dense bfloat16 with accumulation in float32. ``cited`` is the source of the figures but the link's.
    """

    memory_mib: int
    hbm_gbps: float
    link: Link
    tflops: float
    cited: str
    host_gbps: float = 0.0
    host_gib: int = 0
    """Host RAM of one GPU where it belongs to the GPU, else 0: assumed, as it is for machines."""
    one_memory: bool = False
    """GPU and CPU have the same memory."""
    desktop: bool = False
    """One or two of them are assumed to be in a desktop computer."""

    @property
    def link_gbps(self) -> float:
        return self.link.rate

    @property
    def source(self) -> str:
        """Of the rates."""
        return f"{self.cited}; link: {self.link.source}"


GRACE_GBPS = 546
"""NVIDIA's "up to" for the LPDDR5X of one Grace CPU, from the same page as the GH200's figures."""

_GA102 = "NVIDIA Ampere GA102 GPU Architecture: https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_A100 = "NVIDIA's, as on https://glennklockwood.com/garden/processors/A100 (SXM)"

# Rates are NVIDIA's where it publishes them, and dense: half of a figure "with sparsity" where there is no other. Memory is the
# total that nvidia-smi shows, which is undocumented and below the nominal size of most cards.
GPUS = {
    # BFLOAT16 Tensor Core: 312 TFLOPS, 624 with sparsity. The PCIe card of 80 GB has 1935 GB/s.
    "A100-40GB": Gpu(40960, 1555, PCIE4, 312, _A100),
    "A100-80GB": Gpu(81920, 2039, PCIE4, 312, _A100),
    # BFLOAT16 Tensor Core of the H100 SXM: 1,979 TFLOPS, with sparsity.
    "H100": Gpu(
        81559,
        3350,
        PCIE5,
        989,
        "NVIDIA H100 SXM, as on https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html",
    ),
    # No specification of the H20 by NVIDIA was found; these figures are third-party.
    "H20": Gpu(97871, 4000, PCIE5, 148, "not NVIDIA's own: https://willitrunai.com/es/gpus/h20-96gb"),
    # No rate of its HBM3e was found: taken as that of the other H20. The total is the H200's, also of 141 GB.
    "H20-141GB": Gpu(
        143771,
        4000,
        PCIE5,
        148,
        "not NVIDIA's own, and those of the H20 with 96 GB: https://willitrunai.com/es/gpus/h20-96gb; VRAM as of an H200, "
        "assumed",
    ),
    # BFLOAT16 Tensor Core of the H200 SXM: 1,979 TFLOPS, with sparsity.
    "H200": Gpu(143771, 4800, PCIE5, 989, "NVIDIA H200 Tensor Core GPU: https://www.nvidia.com/en-us/data-center/h200/"),
    "B200": Gpu(183359, 8000, PCIE5, 2250, "NVIDIA's, as on https://glennklockwood.com/garden/processors/B200"),
    # BFLOAT16 Tensor Core: 362.05 TFLOPS, 733 with sparsity. ECC takes a part of its 48 GB.
    "L40S": Gpu(
        46068,
        864,
        PCIE4,
        362,
        "NVIDIA's, as on https://www.mullet.se/product.html?product_id=355414",
    ),
    # Appendix C: peak BF16 Tensor TFLOPS with FP32 accumulate 154.8. Without ECC, which takes a part of the memory.
    "A6000": Gpu(49140, 768, PCIE4, 155, _GA102),
    # Appendix A: peak BF16 Tensor TFLOPS with FP32 accumulate 71.
    "3090": Gpu(24576, 936, PCIE4, 71, _GA102, desktop=True),
    # Appendix A, Table 2: peak BF16 Tensor TFLOPS with FP32 accumulate 165.2.
    "4090": Gpu(
        24564,
        1008,
        PCIE4,
        165,
        "NVIDIA Ada GPU Architecture: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        desktop=True,
    ),
    # Appendix A, Table 3: peak BF16 Tensor TFLOPS with FP32 accumulate 209.5.
    "5090": Gpu(
        32607,
        1792,
        PCIE5,
        209,
        "NVIDIA RTX Blackwell GPU Architecture: "
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
        desktop=True,
    ),
    "GH200": Gpu(
        97871,
        4000,
        GH200,
        989,
        "NVIDIA Grace Hopper Superchip Architecture In-Depth, as quoted by "
        "https://datacrunch.io/blog/data-movement-in-the-nvidia-gh200-grace-hopper-superchip",
        GRACE_GBPS,
        host_gib=480,
    ),
    # One Grace has two GPUs: each gets half of the CPU's memory. 186 GB a GPU.
    "GB200": Gpu(
        177_383,
        8000,
        GB200,
        2500,
        "NVIDIA's, as on https://glennklockwood.com/garden/processors/B200 and https://www.elprocus.com/nvidia-gb200-ai-chip",
        GRACE_GBPS / 2,
        host_gib=240,
    ),
    # 1 PFLOP of FP4 with sparsity is 125 TFLOPS of dense bfloat16. Of its 128 GB, 8 GiB stay with the host.
    "GB10": Gpu(
        113_878,
        273,
        GB10,
        125,
        "NVIDIA DGX Spark, as quoted by https://ai-infrastructure.net/dgx-spark/",
        273,
        host_gib=8,
        one_memory=True,
    ),
}
_ALIASES = {
    **{"A100": "A100-80GB", "A100-40": "A100-40GB", "A100-80": "A100-80GB"},
    **{"H20-96": "H20", "H20-96GB": "H20", "H20-141": "H20-141GB", "H20-3E": "H20-141GB"},
    **{"H100-80GB": "H100", "H200-141GB": "H200", "SPARK": "GB10", "DGX-SPARK": "GB10"},
    **{"RTX-A6000": "A6000", **{f"RTX{sign}{card}": card for sign in ("", "-") for card in ("3090", "4090", "5090")}},
}
"""Other names of ``GPUS``."""

EXAMPLES = ("8xH20", "4x4090", "1xH200", "2xA100-80GB", "1x5090", "1xGH200", "1xSPARK")
PRESET_HOST_GIB = {"8xH20": 1500, "1xH200": 512}
"""Host RAM of these machines without ``--host-gb``: assumed; such machines are sold with less and with more."""
HOST_GIB_PER_GPU = 128
DESKTOP_HOST_GIB = 192
"""The same for other machines, by GPU, and for a desktop: four modules of 48 GB."""
DESKTOP_GPUS = 2
"""More do not fit in a desktop."""

DDR5_4800_GBPS = 38.4
"""One channel: 4800 MT/s of 8 bytes."""
SERVER_HOST_GBPS = 16 * DDR5_4800_GBPS
"""Host memory of a machine with 8 GPUs: two CPUs of 8 channels (H200 systems of MLPerf Inference
v4.1 have two Xeon 8480C). Assumed."""
WORKSTATION_HOST_GBPS = 8 * DDR5_4800_GBPS
"""The same of a machine with several GPUs that are also sold for desktops: one server CPU of 8 channels. Assumed."""
DESKTOP_HOST_GBPS = 2 * 44.8
"""A desktop's two channels of DDR5-5600. Assumed."""


FIGURES = ("--gpus", "--vram-gb", "--host-gb", "--link-gbps", "--hbm-gbps", "--tflops")
"""The flags that describe a machine without a preset."""


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
    host_gbps: float = 0.0
    """Nominal rate of all of the host's memory together, 0 if unknown."""
    one_memory: bool = False
    """GPU and CPU have the same memory, so an offloaded expert takes as much of it as a resident one."""
    available_bytes: int = 0
    """Of that one memory, what GPU and CPU may take together; 0: VRAM and host RAM are parts of it that add up."""
    read_gbps: float = 0.0
    """At which kernels read host memory; 0: a share of ``link_gbps``."""
    link: Link | None = None
    """What is published of links of this kind; None where ``link_gbps`` is this machine's own."""

    @property
    def slowest(self) -> Machine | None:
        """This machine with the worst published rate, None if none is known."""
        return dataclasses.replace(self, read_gbps=self.link.slowest, link=None) if self.link and self.link.slowest else None

    @property
    def pool_bytes(self) -> int:
        """What GPUs and host have together where they have one memory."""
        return self.available_bytes or self.vram_bytes + self.host_bytes


def preset(name: str) -> Machine:
    """The machine named ``8xH20``, or any other count of a known GPU. Raises ``MachineError``, which lists them."""
    match = re.fullmatch(r"(\d{1,3})x([\w-]+)", name, flags=re.IGNORECASE)
    kind = _kind(match.group(2)) if match else None
    if match is None or kind is None or not int(match.group(1)):
        raise MachineError(
            f"--machine {name!r}: must be a count, an x and a GPU, such as {', '.join(EXAMPLES[:3])}; known are "
            f"{', '.join(GPUS)}; describe another machine by {', '.join(FIGURES[:-1])} and {FIGURES[-1]}"
        )
    gpus, gpu = int(match.group(1)), GPUS[kind]
    name = f"{gpus}x{kind}"
    desktop = gpu.desktop and gpus <= DESKTOP_GPUS
    host = PRESET_HOST_GIB.get(name, DESKTOP_HOST_GIB if desktop else (gpu.host_gib or HOST_GIB_PER_GPU) * gpus)
    host_gbps = DESKTOP_HOST_GBPS if desktop else WORKSTATION_HOST_GBPS if gpu.desktop else SERVER_HOST_GBPS
    host_gbps = gpu.host_gbps * gpus or host_gbps
    return Machine(
        name,
        gpus,
        gpu.memory_mib << 20,
        host * GIB,
        gpu.link_gbps,
        gpu.hbm_gbps,
        gpu.tflops,
        f"{gpu.source}; host RAM of {host} GiB{'' if gpu.host_gbps else f' at {host_gbps:.0f} GB/s'} assumed",
        host_gbps,
        gpu.one_memory,
        link=gpu.link,
    )


def _kind(name: str) -> str | None:
    """The key of ``GPUS`` for a name in any case."""
    name = name.upper().replace("_", "-")
    kind = _ALIASES.get(name, name)
    return kind if kind in GPUS else None


def known_gpu(name: str, nbytes: int) -> Gpu | None:
    """The figures of the GPU that the driver names; where a kind has several sizes, the nearest."""
    words = re.split(r"\W+", name)
    same = [gpu for kind, gpu in GPUS.items() if kind.split("-")[0] in words]
    return min(same, key=lambda gpu: abs((gpu.memory_mib << 20) - nbytes), default=None)


def of_gpus(gpus: Sequence[tuple[str, int]], integrated: bool = False) -> Machine:
    """This machine, from the name and the bytes of each of its GPUs. ``integrated``: so says the driver of them, because their
    memory is the host's. Rates are 0 if the first is not in ``GPUS``. Raises ``MachineError`` if there is no GPU."""
    if not gpus:
        raise MachineError(
            "this machine has no CUDA GPU: name a machine, such as --machine 8xH20, or describe one by " + ", ".join(FIGURES)
        )
    name = gpus[0][0]
    known, host = known_gpu(name, gpus[0][1]), host_available()
    one_memory = integrated or (known is not None and known.one_memory)
    return Machine(
        f"{len(gpus)} x {name}",
        len(gpus),
        min(nbytes for _, nbytes in gpus),
        host,
        known.link_gbps if known else 0,
        known.hbm_gbps if known else 0,
        known.tflops if known else 0,
        "this machine" + (f"; rates: {known.source}" if known else ""),
        known.host_gbps * len(gpus) if known else 0,
        one_memory,
        host if one_memory else 0,
        link=known.link if known else None,
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
    host_gbps: float | None = None,
) -> Machine:
    """``base`` with the given figures (GiB, and 1e9 bytes a second) in place of its own. Without ``base``, all but
    ``host_gbps`` are required."""
    given: dict[str, Any] = {
        "gpus": gpus,
        "vram_bytes": None if vram_gb is None else int(vram_gb * GIB),
        "host_bytes": None if host_gb is None else int(host_gb * GIB),
        "link_gbps": link_gbps,
        "hbm_gbps": hbm_gbps,
        "tflops": tflops,
        "host_gbps": host_gbps,
    }
    values = {name: value for name, value in given.items() if value is not None}
    if base is None:
        base = Machine("given by its figures", 0, 0, 0, 0, 0, 0, "given")
    elif values:
        base = dataclasses.replace(base, name=f"{base.name}, adjusted", source=f"{base.source}; as given: {', '.join(values)}")
    machine = dataclasses.replace(base, **values, link=base.link if link_gbps is None else None)
    missing = [flag for flag, name in zip(FIGURES, given, strict=False) if not getattr(machine, name) > 0]
    if missing:
        raise MachineError(f"{', '.join(missing)}: not known for this machine; give numbers above 0")
    return machine

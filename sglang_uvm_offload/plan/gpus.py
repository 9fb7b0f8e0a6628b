"""Kinds of GPUs: their memory, their rates, and the link that they have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sglang_uvm_offload.plan.links import GB10, GB200, GH200, PCIE4, PCIE5, Link


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
    """Assumed host RAM per GPU where it belongs to the GPU; else 0."""
    one_memory: bool = False
    """Whether GPU and CPU share one memory."""
    desktop: bool = False
    """Whether a machine with one or two of them is assumed to be a desktop."""

    @property
    def link_gbps(self) -> float:
        return self.link.rate

    @property
    def source(self) -> str:
        """The source of the rates."""
        return f"{self.cited}; link: {self.link.source}"


GRACE_GBPS = 546
"""NVIDIA's "up to" for the LPDDR5X of one Grace CPU, from the same page as the GH200's figures."""

_GA102 = "NVIDIA Ampere GA102 GPU Architecture: https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "NVIDIA Ada GPU Architecture: https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = (
    "NVIDIA RTX Blackwell GPU Architecture: "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_GRACE_HOPPER = (
    "NVIDIA Grace Hopper Superchip Architecture In-Depth, as quoted by "
    "https://datacrunch.io/blog/data-movement-in-the-nvidia-gh200-grace-hopper-superchip"
)
_A100 = "NVIDIA's, as on https://glennklockwood.com/garden/processors/A100 (SXM)"
_H100 = "NVIDIA H100 SXM, as on https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
_H20 = "https://willitrunai.com/es/gpus/h20-96gb"
_H200 = "NVIDIA H200 Tensor Core GPU: https://www.nvidia.com/en-us/data-center/h200/"
_B200 = "NVIDIA's, as on https://glennklockwood.com/garden/processors/B200"
_L40S = "NVIDIA's, as on https://www.mullet.se/product.html?product_id=355414"
_SPARK = "NVIDIA DGX Spark, as quoted by https://ai-infrastructure.net/dgx-spark/"

# Rates are NVIDIA's where it publishes them, and dense: half of a figure "with sparsity" where there is no other. Memory is the
# total that nvidia-smi shows, which is undocumented and below the nominal size of most cards.
GPUS = {
    # BFLOAT16 Tensor Core: 312 TFLOPS, 624 with sparsity. The PCIe card of 80 GB has 1935 GB/s.
    "A100-40GB": Gpu(40960, 1555, PCIE4, 312, _A100),
    "A100-80GB": Gpu(81920, 2039, PCIE4, 312, _A100),
    # BFLOAT16 Tensor Core of the H100 SXM: 1,979 TFLOPS, with sparsity.
    "H100": Gpu(81559, 3350, PCIE5, 989, _H100),
    # No specification of the H20 by NVIDIA was found; these figures are third-party.
    "H20": Gpu(97871, 4000, PCIE5, 148, f"not NVIDIA's own: {_H20}"),
    # No rate of its HBM3e was found: taken as that of the other H20. The total is the H200's, also of 141 GB.
    "H20-141GB": Gpu(
        *(143771, 4000, PCIE5, 148),
        f"not NVIDIA's own, and those of the H20 with 96 GB: {_H20}; VRAM as of an H200, assumed",
    ),
    # BFLOAT16 Tensor Core of the H200 SXM: 1,979 TFLOPS, with sparsity.
    "H200": Gpu(143771, 4800, PCIE5, 989, _H200),
    "B200": Gpu(183359, 8000, PCIE5, 2250, _B200),
    # BFLOAT16 Tensor Core: 362.05 TFLOPS, 733 with sparsity. ECC takes a part of its 48 GB.
    "L40S": Gpu(46068, 864, PCIE4, 362, _L40S),
    # Appendix C: peak BF16 Tensor TFLOPS with FP32 accumulate 154.8. Without ECC, which takes a part of the memory.
    "A6000": Gpu(49140, 768, PCIE4, 155, _GA102),
    # Appendix A: peak BF16 Tensor TFLOPS with FP32 accumulate 71.
    "3090": Gpu(24576, 936, PCIE4, 71, _GA102, desktop=True),
    # Appendix A, Table 2: peak BF16 Tensor TFLOPS with FP32 accumulate 165.2.
    "4090": Gpu(24564, 1008, PCIE4, 165, _ADA, desktop=True),
    # Appendix A, Table 3: peak BF16 Tensor TFLOPS with FP32 accumulate 209.5.
    "5090": Gpu(32607, 1792, PCIE5, 209, _BLACKWELL, desktop=True),
    "GH200": Gpu(97871, 4000, GH200, 989, _GRACE_HOPPER, GRACE_GBPS, host_gib=480),
    # One Grace has two GPUs: each gets half of the CPU's memory. 186 GB a GPU.
    "GB200": Gpu(
        *(177_383, 8000, GB200, 2500, f"{_B200} and https://www.elprocus.com/nvidia-gb200-ai-chip", GRACE_GBPS / 2),
        host_gib=240,
    ),
    # 1 PFLOP of FP4 with sparsity is 125 TFLOPS of dense bfloat16. Of its 128 GB, 8 GiB stay with the host.
    "GB10": Gpu(113_878, 273, GB10, 125, _SPARK, 273, host_gib=8, one_memory=True),
}
_ALIASES = {
    **{"A100": "A100-80GB", "A100-40": "A100-40GB", "A100-80": "A100-80GB"},
    **{"H20-96": "H20", "H20-96GB": "H20", "H20-141": "H20-141GB", "H20-3E": "H20-141GB"},
    **{"H100-80GB": "H100", "H200-141GB": "H200", "SPARK": "GB10", "DGX-SPARK": "GB10"},
    **{"RTX-A6000": "A6000", **{f"RTX{sign}{card}": card for sign in ("", "-") for card in ("3090", "4090", "5090")}},
}
"""Aliases of ``GPUS`` keys."""


def kind_of(name: str) -> str | None:
    """The key of ``GPUS`` for a name; case does not matter."""
    name = name.upper().replace("_", "-")
    kind = _ALIASES.get(name, name)
    return kind if kind in GPUS else None


def known_gpu(name: str, nbytes: int) -> Gpu | None:
    """The GPU for the driver's name; of kinds with several memory sizes, the closest."""
    words = re.split(r"\W+", name)
    same = [gpu for kind, gpu in GPUS.items() if kind.split("-")[0] in words]
    return min(same, key=lambda gpu: abs((gpu.memory_mib << 20) - nbytes), default=None)

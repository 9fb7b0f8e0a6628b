"""Describes the machine for a result. As a program it prints JSON (this starts CUDA)."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu import shown_code

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = [name for name in os.environ if name.startswith("STANDIN_")]
"""Variables that are set when the tests' stand-in driver replaces the real one."""
REHEARSED = "STANDIN_FIRST_EXPERT" in STAND_IN
"""Whether servers can run over the stand-in too, with the arguments for a GPU, as ``scripts/rehearse.sh`` prepares it."""


def describe() -> dict[str, Any]:
    import torch

    from sglang_uvm_offload.memory.host_ram import host_available

    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here")
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(0),
        "compute_capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "vram_total_bytes": total,
        "vram_free_bytes": free,
        "driver": driver(),
        "cuda_of_torch": torch.version.cuda,
        "nvcc": nvcc(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "sglang": installed("sglang"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "host_total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "host_available_bytes": host_available(),
        "transparent_huge_pages": read(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "commit": commit(),
        "code": shown_code.digests(),
        "measured": computes() and not STAND_IN,
    }


def computes() -> bool:
    """Whether a kernel computes a known answer. Over a stand-in driver launches succeed but nothing runs."""
    import torch

    numbers = torch.arange(1000, device="cuda")
    return int((numbers * 3 + 1).sum().item()) == 3 * 499_500 + 1000


def zeros_by_copies() -> None:
    """Makes torch zero tensors by copies: over a stand-in driver no kernel writes zeros, and reused memory keeps old bytes."""
    import torch

    module: Any = torch
    made = torch.zeros

    def zeros(*size: Any, device: Any = None, **how: Any) -> torch.Tensor:
        return made(*size, **how).to(device)

    def zeros_like(like: torch.Tensor) -> torch.Tensor:
        return zeros(like.shape, dtype=like.dtype, device=like.device)

    module.zeros, module.zeros_like = zeros, zeros_like


def driver() -> str | None:
    text = read(Path("/proc/driver/nvidia/version")) or ""
    if found := re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text):
        return found[1]
    if tool := shutil.which("nvidia-smi"):
        answer = subprocess.run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.split("\n")[0].strip()
    return None


def nvcc() -> str | None:
    from sglang_uvm_offload.cuda.build import BuildFailure, find_nvcc, nvcc_release

    try:
        return nvcc_release(find_nvcc())
    except BuildFailure:
        return None


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """Returns the commit; None outside a git checkout."""
    if not shutil.which("git"):
        return None
    answer = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    return answer.stdout.strip() if answer.returncode == 0 else None


def read(path: Path) -> str | None:
    return path.read_text().strip() if path.exists() else None


if __name__ == "__main__":
    print(json.dumps(describe()))

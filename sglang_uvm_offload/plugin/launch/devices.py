"""Checks whether the devices of a launch on this machine can offload experts."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.plugin.launch.ranks import ranks


def local_gpus(cfg: Any) -> list[int]:
    """The GPUs of the ranks on this machine."""
    return sorted({rank.gpu for rank in ranks(cfg)})


def problems(cfg: Any) -> list[str]:
    """Why the devices of ``cfg`` (SGLang's resolved arguments) cannot offload."""
    out = []
    if cfg.device not in ("cuda", "cpu"):
        out.append(f"--device {cfg.device}: expert offloading needs cuda or cpu")
    return out + (gpu_problems(local_gpus(cfg)) if cfg.device == "cuda" else [])


def gpu_problems(gpus: list[int]) -> list[str]:
    """Why ``gpus`` cannot keep experts in unified memory, or why the CUDA library cannot be built for them. A driver problem
    affects all GPUs and is listed once."""
    from sglang_uvm_offload.cuda.build import BuildFailure, build
    from sglang_uvm_offload.cuda.canary import canary_problems
    from sglang_uvm_offload.cuda.device import device_arch, problems_of

    if found := problems_of(gpus) or canary_problems(tuple(gpus)):
        return found
    try:
        for arch in {device_arch(gpu) for gpu in gpus}:
            build(arch)
    except BuildFailure as failure:
        return [str(failure)]
    return []

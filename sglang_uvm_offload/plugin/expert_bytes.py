"""The bytes of a launch's experts by the headers of its checkpoint, and whether host RAM holds what is to be there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.cuda.numa import crowded
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.plugin.compat import as_given, model_config_of, resolving_view
from sglang_uvm_offload.plugin.planned_launch import hicache, ranks
from sglang_uvm_offload.sizing.host_need import HostNeed
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.quantization import conversion
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.sizing.verdict import ONE_MEMORY
from sglang_uvm_offload.units import size


@dataclass(frozen=True)
class ExpertBytes:
    """Over all ranks of all replicas on this machine."""

    resident: int
    offloaded: int


def expert_bytes(config: OffloadConfig, cfg: Any, model_config: Any) -> ExpertBytes | None:
    """None if only loading shows it: several machines share the experts, or the headers cannot be read, or a flag quantises the
    checkpoint while it loads."""
    if cfg.nnodes > 1:
        return None
    try:
        model = ModelFiles(cfg.model_path, cfg.revision, cfg.download_dir).shape(str(model_config.dtype).removeprefix("torch."))
    except CheckpointError:
        return None
    if conversion(model_config.quantization, model.quantization):
        return None
    places = model.num_experts + cfg.ep_num_redundant_experts
    total = model.expert_bytes * places // model.num_experts * (1 if cfg.attn_dp_size > 1 else cfg.dp_size)
    offloaded = total * (places - config.num_resident) // places
    return ExpertBytes(total - offloaded, offloaded)


def problems(config: OffloadConfig, server_args: Any) -> list[str]:
    """The shortage of host RAM as far as the checkpoint's headers and the flags show it."""
    return shortage(config, host_need(config, server_args), host_available())


def host_need(config: OffloadConfig, server_args: Any) -> HostNeed:
    """A lower bound for a launch that no plan counts: its experts, if their headers show them, and the hierarchical caches
    whose size a flag gives."""
    cfg = resolving_view(server_args)
    known = expert_bytes(config, cfg, model_config_of(server_args))
    cache = hicache(cfg, as_given(server_args)).get("hicache_bytes", 0) if cfg.pp_size == 1 else 0
    return HostNeed(0 if known is None else max(0, known.offloaded), cache * len(ranks(cfg)))


def crowded_nodes(config: OffloadConfig, server_args: Any) -> list[str]:
    """A line for each NUMA node that is smaller than what its GPUs' ranks offload to it."""
    cfg = resolving_view(server_args)
    known = expert_bytes(config, cfg, model_config_of(server_args)) if cfg.device == "cuda" else None
    if known is None:
        return []
    by_gpu, local = Counter[int](), ranks(cfg)
    for rank in local:
        by_gpu[rank.gpu] += known.offloaded // len(local)
    return crowded(by_gpu)


def shortage(config: OffloadConfig, need: HostNeed, available: int, gpus: int = 0) -> list[str]:
    """Why host RAM cannot hold what the launch needs, of which ``available`` bytes are left, and GPUs take ``gpus`` of the same
    memory. What is not known here is checked as it is loaded, tensor by tensor."""
    if not (need.experts or need.cache) or need.total <= available:
        return []
    left = size(max(0, available - need.total + need.experts))
    of = f"of {size(available)} beside {need.beside_experts()}" + (f", after {size(gpus)} for the GPU" if gpus else "")
    remedy = "keep more resident, or add host RAM"
    if need.cache:
        remedy = f"give a smaller --hicache-size or --hicache-ratio, {remedy}"
    return [
        f"{flag_name('num_resident')} {config.num_resident}: the offloaded experts need {size(need.experts)} of host RAM, and "
        f"{left} is left {of}; {ONE_MEMORY if gpus else remedy}"
    ]

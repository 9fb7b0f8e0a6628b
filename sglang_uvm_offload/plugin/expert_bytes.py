"""The bytes of a launch's experts by the headers of a local checkpoint, and whether host RAM holds the offloaded ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.host_ram import host_available, host_margin
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.quantization import conversion
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.units import size


@dataclass(frozen=True)
class ExpertBytes:
    """Over all ranks of all replicas on this machine."""

    resident: int
    offloaded: int


def expert_bytes(config: OffloadConfig, cfg: Any, model_config: Any) -> ExpertBytes | None:
    """None if only loading shows it: several machines share the experts, or the checkpoint is not local, or a flag quantises it
    while it loads."""
    path = Path(cfg.model_path)
    if not path.is_dir() or cfg.nnodes > 1:
        return None
    try:
        model = load(path, str(model_config.dtype).removeprefix("torch."))
    except CheckpointError:
        return None
    if conversion(model_config.quantization, model.quantization):
        return None
    places = model.num_experts + cfg.ep_num_redundant_experts
    total = model.expert_bytes * places // model.num_experts * (1 if cfg.attn_dp_size > 1 else cfg.dp_size)
    offloaded = total * (places - config.num_resident) // places
    return ExpertBytes(total - offloaded, offloaded)


def problems(config: OffloadConfig, cfg: Any, model_config: Any) -> list[str]:
    """Why this machine's host RAM cannot hold the offloaded ones. What is not known here is checked as it is loaded, tensor by
    tensor."""
    known = expert_bytes(config, cfg, model_config)
    if known is None:
        return []
    margin = host_margin(known.offloaded)
    room = max(host_available() - margin, 0)
    if known.offloaded <= room:
        return []
    return [
        f"{flag_name('num_resident')} {config.num_resident}: the offloaded experts need {size(known.offloaded)} of host RAM, "
        f"and {size(room)} is left ({size(margin)} is kept for other uses); keep more resident, or add host RAM"
    ]

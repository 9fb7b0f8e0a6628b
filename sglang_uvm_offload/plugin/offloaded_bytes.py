"""The host RAM that the offloaded experts of a launch need, by the headers of a local checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.host_ram import HOST_MARGIN_BYTES, host_available
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.units import size


def offloaded_bytes(config: OffloadConfig, cfg: Any, hf_config: Any) -> int | None:
    """Of all replicas on this machine; None if only loading shows it: several machines share the experts, or the checkpoint is
    not local, or is converted while it loads (to another dtype or quantisation)."""
    path = Path(cfg.model_path)
    dtype = str(getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None))
    converted = "float32" in dtype or (cfg.quantization is not None and not hasattr(hf_config, "quantization_config"))
    if not path.is_dir() or cfg.nnodes > 1 or converted:
        return None
    try:
        model = load(path)
    except CheckpointError:
        return None
    replicas = 1 if cfg.attn_dp_size > 1 else cfg.dp_size
    return replicas * model.expert_bytes * (model.num_experts - config.num_resident) // model.num_experts


def problems(config: OffloadConfig, cfg: Any, hf_config: Any) -> list[str]:
    """Why this machine's host RAM cannot hold them. What is not known here is checked as it is loaded, tensor by tensor."""
    offloaded = offloaded_bytes(config, cfg, hf_config)
    room = max(host_available() - HOST_MARGIN_BYTES, 0)
    if offloaded is None or offloaded <= room:
        return []
    return [
        f"{flag_name('num_resident')} {config.num_resident}: the offloaded experts need {size(offloaded)} of host RAM, and "
        f"{size(room)} is left ({size(HOST_MARGIN_BYTES)} is kept for other uses); keep more resident, or add host RAM"
    ]

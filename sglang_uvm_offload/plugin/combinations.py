"""SGLang's settings that offloading cannot be combined with."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.flags import flag_name

_N = flag_name("num_resident")

OWN_PATH_A2A = {"megamoe", "flashinfer_megamoe", "ascend_fuseep"}
"""All-to-all backends that compute experts without the quantisation method's ``apply``."""

REFUSED_LOAD_FORMATS = {"gguf", "remote_instance"}
"""``remote_instance`` registers the experts' addresses for RDMA, and their pages move."""


def problems(config: OffloadConfig, cfg: Any) -> list[str]:
    """Why SGLang's resolved arguments ``cfg`` cannot be served with ``config``."""
    refused = {
        "--enable-paged-experts": cfg.enable_paged_experts,
        "--cpu-offload-gb": cfg.cpu_offload_gb,
        "--offload-group-size": cfg.offload_group_size is not None and cfg.offload_group_size > 0,
        "--kt-method / --kt-weight-path (KTransformers)": cfg.kt_weight_path,
        "--enable-eplb": cfg.enable_eplb,
        "--ep-num-redundant-experts": cfg.ep_num_redundant_experts,
        "--enable-lora / --lora-paths": cfg.enable_lora or cfg.lora_paths,
        "--enable-memory-saver": cfg.enable_memory_saver,
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-pdmux": cfg.enable_pdmux,
        "--use-ray (its actors load no plugins)": cfg.use_ray,
        "--enable-nvidia-megakernel": cfg.enable_nvidia_megakernel,
        "--weight-cache-mode": cfg.weight_cache_mode not in (None, "off"),
        "--elastic-ep-backend": cfg.elastic_ep_backend,
        "--dwdp-size": (cfg.dwdp_size or 1) > 1,
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": cfg.moe_a2a_backend in OWN_PATH_A2A,
        f"--load-format {cfg.load_format}": cfg.load_format in REFUSED_LOAD_FORMATS,
        f"--speculative-draft-load-format {cfg.speculative_draft_load_format}": cfg.speculative_draft_load_format
        in REFUSED_LOAD_FORMATS,
        "--remote-instance-weight-loader-start-seed-via-transfer-engine": (
            cfg.remote_instance_weight_loader_start_seed_via_transfer_engine
        ),
        # Never tried: Dynamo would trace into the calls that count, which go through ctypes with addresses of tensors.
        "--enable-torch-compile": cfg.enable_torch_compile,
    }
    return [f"{name}: cannot be combined with {_N}" for name, given in refused.items() if given] + _numbering(config, cfg)


def _numbering(config: OffloadConfig, cfg: Any) -> list[str]:
    """Whether the ids in flags and files would mean other experts. They are the checkpoint's ids; layers see SGLang's physical
    ids, which differ only with ``--init-expert-location``."""
    named = {
        "profile": config.profiles,
        "save_profile": config.save_profile,
        "trace": config.trace,
        "resident_ids": config.resident_ids,
    }
    given = [flag_name(field) for field, value in named.items() if value]
    if cfg.init_expert_location == "trivial" or not given:
        return []
    return [
        f"--init-expert-location: cannot be combined with {', '.join(given)}: it renumbers experts by location, and ids in "
        "files and flags are the checkpoint's; leave out one or the other"
    ]

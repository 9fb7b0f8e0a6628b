"""Checks of a launch against this SGLang and this model: every unsupported combination, found before anything loads."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import AUTO, OffloadConfig
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.host_ram import host_available, host_margin
from sglang_uvm_offload.plugin import auto_resident, output_files, planned_launch, recording, vram_check
from sglang_uvm_offload.plugin.profiles import profile_problems
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.moe_shape import stated_experts
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.units import size

_N = flag_name("num_resident")

DIRECT_KERNEL_MODELS = {
    "DeepseekForCausalLM",
    "AfmoeForCausalLM",
    "DbrxForCausalLM",
    "XverseMoeForCausalLM",
    "BeamForCausalLM",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "MuseSparkForCausalLM",
    "MuseSparkForConditionalGeneration",
}
"""Architectures whose code passes expert weights to kernels itself, so the layer's hooks cannot take over their memory."""

OWN_PATH_A2A = {"megamoe", "flashinfer_megamoe", "ascend_fuseep"}
"""All-to-all backends that compute experts without the quantisation method's ``apply``."""


def check(config: OffloadConfig, server_args: Any) -> OffloadConfig:
    """``config`` with ``auto`` resolved to a number and a backend, and a new launch id. Raises ``FlagError`` with every reason
    why ``server_args`` cannot be served with offloading."""
    cfg = resolving_view(server_args)
    problems = (
        _combination_problems(config, cfg) + _numbering_problems(config, cfg) + output_files.problems(config, server_args)
    )
    num_experts, reasons = _experts(config, server_args)
    problems += reasons
    if num_experts is not None:
        problems += vram_check.problems(config, server_args)
        try:
            config = auto_resident.resolved(config, server_args)
        except FlagError as error:
            problems += error.problems
        else:
            problems += _resident_problems(config, num_experts, server_args)
        problems += profile_problems(config, model_config_of(server_args))
    if problems:
        raise FlagError(problems)
    backend = config.backend if config.backend != "auto" else "uvm" if cfg.device == "cuda" else "emulated"
    return dataclasses.replace(config, backend=backend, launch_id=uuid.uuid4().hex)


def fraction_with_headroom(config: OffloadConfig, cfg: Any) -> float | None:
    """``mem_fraction_static`` less the headroom, None for no change (a CPU has no VRAM)."""
    capacity_mib = get_device_memory_capacity(cfg.device) if cfg.device == "cuda" else None
    if not capacity_mib or not config.headroom_gb or cfg.mem_fraction_static is None:
        return None
    fraction = cfg.mem_fraction_static - config.headroom_gb * 1024 / capacity_mib
    if fraction <= 0:
        raise FlagError(
            [
                f"{flag_name('headroom_gb')} {config.headroom_gb}: leaves nothing of --mem-fraction-static "
                f"{cfg.mem_fraction_static} on a GPU of {capacity_mib / 1024:.1f} GiB"
            ]
        )
    return fraction


def _combination_problems(config: OffloadConfig, cfg: Any) -> list[str]:
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
        f"--load-format {cfg.load_format}": cfg.load_format == "gguf",
    }
    out = [f"{name}: cannot be combined with {_N}" for name, given in refused.items() if given]
    if cfg.device not in ("cuda", "cpu"):
        out.append(f"--device {cfg.device}: must be cuda or cpu for expert offloading")
    if config.backend == "uvm" and cfg.device == "cpu":
        out.append(f"{flag_name('backend')} uvm: needs a CUDA device, not --device cpu")
    if config.backend == "emulated" and cfg.device == "cuda":
        out.append(f"{flag_name('backend')} emulated: needs --device cpu; on cuda use uvm or auto")
    if cfg.device == "cuda":
        from sglang_uvm_offload.cuda.canary import canary_problems
        from sglang_uvm_offload.cuda.device import device_problems

        out += device_problems(cfg.base_gpu_id or 0) or canary_problems(tuple(planned_launch.gpus(cfg)))
    return out + recording.problems(config, cfg)


def _numbering_problems(config: OffloadConfig, cfg: Any) -> list[str]:
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


def _experts(config: OffloadConfig, server_args: Any) -> tuple[int | None, list[str]]:
    """The routed experts per layer that the model's config states, None without any; and why they cannot be served."""
    model = model_config_of(server_args)
    architectures = set(model.hf_config.architectures or [])
    out = [
        f"{name}: this model's code computes experts without SGLang's FusedMoE layer, so {_N} cannot serve it"
        for name in sorted(architectures & DIRECT_KERNEL_MODELS)
    ]
    num_experts = stated_experts(model.hf_text_config)
    if num_experts is None and not out:
        given = AUTO if config.auto else config.num_resident
        out.append(f"{_N} {given}: the model ({', '.join(sorted(architectures))}) has no routed experts")
    return num_experts, out


def _resident_problems(config: OffloadConfig, num_experts: int, server_args: Any) -> list[str]:
    """Why N experts of this model cannot be resident, or the others not offloaded. Which layers have a router is known only
    once the model is built."""
    out = config.expert_problems(num_experts)
    return out or _host_ram_problems(config, resolving_view(server_args), model_config_of(server_args).hf_config)


def _host_ram_problems(config: OffloadConfig, cfg: Any, hf_config: Any) -> list[str]:
    """Whether this machine's host RAM holds the offloaded experts, by the headers of a local checkpoint. A checkpoint that is
    converted while it loads (to another dtype or quantisation) is checked then, tensor by tensor."""
    path = Path(cfg.model_path)
    dtype = str(getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None))
    converted = "float32" in dtype or (cfg.quantization is not None and not hasattr(hf_config, "quantization_config"))
    if not path.is_dir() or cfg.nnodes > 1 or converted:
        return []
    try:
        model = load(path)
    except CheckpointError:
        return []
    replicas = 1 if cfg.attn_dp_size > 1 else cfg.dp_size
    offloaded = replicas * model.expert_bytes * (model.num_experts - config.num_resident) // model.num_experts
    margin = host_margin(offloaded)
    room = max(host_available() - margin, 0)
    if offloaded <= room:
        return []
    return [
        f"{_N} {config.num_resident}: the offloaded experts need {size(offloaded)} of host RAM, and {size(room)} is left "
        f"({size(margin)} is kept for other uses); keep more resident, or add host RAM"
    ]

"""SGLang settings that cannot be combined with offloading."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.plugin import compat

_N = flag_name("num_resident")

OWN_PATH_A2A = {"megamoe", "flashinfer_megamoe", "ascend_fuseep"}
"""All-to-all backends that compute experts without the quantisation method's ``apply``."""

NO_EXPERTS = "SGLang's loader for it looks up expert parameters by their checkpoint name and finds none"

_OWN_OFFLOAD = "it offloads the same weights itself"

LOAD_FORMATS = {
    "bitsandbytes": NO_EXPERTS,
    "expert_pack": _OWN_OFFLOAD,
    "flash_rl": "SGLang uses it only for dense Qwen2 and Qwen3 models",
    "gguf": "GGUF experts are allocated one by one while they load, with sizes unknown beforehand",
    "layered": "SGLang loads no MoE model with it, and the model that it builds owns no memory to offload",
    "remote_instance": "it sends weights from RDMA-registered memory, and CUDA cannot register unified memory for RDMA",
}
"""The refused load formats, each with the reason. GPUDirect RDMA's documentation does not list unified memory."""

QUANTIZATIONS = {"bitsandbytes": NO_EXPERTS}
"""The refused quantisations, each with the reason."""


def problems(config: RequestedConfig, cfg: Any) -> list[str]:
    """Why ``config`` cannot be combined with SGLang's resolved arguments ``cfg``."""
    refused = {
        "--enable-paged-experts": (cfg.enable_paged_experts, _OWN_OFFLOAD),
        "--cpu-offload-gb": (cfg.cpu_offload_gb, _OWN_OFFLOAD),
        "--offload-group-size": (cfg.offload_group_size is not None and cfg.offload_group_size > 0, _OWN_OFFLOAD),
        "--kt-method / --kt-weight-path": (
            cfg.kt_weight_path,
            "KTransformers computes experts on the CPU from its own memory",
        ),
        "--enable-two-batch-overlap": (cfg.enable_two_batch_overlap, "two half batches then run different layers at once"),
        "--enable-pdmux": (
            cfg.enable_pdmux,
            "prefill and decode steps then run concurrently, so there is no point between two steps",
        ),
        "--use-ray": (cfg.use_ray, "Ray actors load no plugins"),
        "--enable-nvidia-megakernel": (
            cfg.enable_nvidia_megakernel,
            "it runs whole steps without SGLang's FusedMoE layers",
        ),
        "--weight-cache-mode": (
            cfg.weight_cache_mode not in (None, "off"),
            "it shares weights between processes over CUDA IPC, which does not support unified memory",
        ),
        "--elastic-ep-backend": (
            cfg.elastic_ep_backend,
            "it fetches experts into RDMA-registered memory, and CUDA cannot register unified memory for RDMA",
        ),
        "--dwdp-size": ((cfg.dwdp_size or 1) > 1, "it moves experts to its own pages, which other GPUs read"),
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": (
            cfg.moe_a2a_backend in OWN_PATH_A2A,
            "it computes experts in its own kernel, from copies in its own layout",
        ),
        f"--load-format {cfg.load_format}": _load_format(cfg.load_format),
        f"--speculative-draft-load-format {cfg.speculative_draft_load_format}": _load_format(cfg.speculative_draft_load_format),
        "--remote-instance-weight-loader-start-seed-via-transfer-engine": (
            cfg.remote_instance_weight_loader_start_seed_via_transfer_engine,
            LOAD_FORMATS["remote_instance"],
        ),
        "SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT": (
            compat.swaps_expert_memory(),
            "it moves experts into another layer's memory between prefill and decode",
        ),
    }
    traces = {} if config.trace is None else _without_traces(cfg)
    out = [
        f"{name}: cannot be combined with {flag}: {why}"
        for flag, rows in ((_N, refused), (flag_name("trace"), traces))
        for name, (given, why) in rows.items()
        if given
    ]
    return out + _named_experts(config, cfg)


def _without_traces(cfg: Any) -> dict[str, tuple[Any, str]]:
    """Settings under which no routing trace can be recorded, with the reason."""
    parts = "no single rank sees the routing of a whole step"
    return {
        f"--ep-size {cfg.ep_size}": (cfg.ep_size > 1, parts),
        f"--pp-size {cfg.pp_size}": (cfg.pp_size > 1, parts),
        "--enable-dp-attention / --attn-dp-size": (cfg.attn_dp_size > 1, parts),
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": (cfg.moe_a2a_backend != "none", parts),
        f"--attn-cp-size {cfg.attn_cp_size}": (cfg.attn_cp_size > 1, parts),
        f"--moe-dp-size {cfg.moe_dp_size}": (cfg.moe_dp_size > 1, parts),
        f"--speculative-algorithm {cfg.speculative_algorithm}": (
            cfg.speculative_algorithm,
            "a step verifies several draft tokens per request and rejects some",
        ),
        f"--dllm-algorithm {cfg.dllm_algorithm}": (cfg.dllm_algorithm, "it decodes blocks instead of tokens"),
    }


OWN_FLAGS = {"kt_": "kt_weight_path", "paged_experts_": "enable_paged_experts", "offload_": "offload_group_size"}
"""SGLang's built-in offloading: the prefix of each kind's arguments, and the argument that enables it."""


def ignored(server_args: Any) -> list[str]:
    """Arguments of SGLang's built-in offloading that have no effect. ``problems`` refuses the others."""
    differing, out = _differing(server_args), []
    for prefix, turns_on in OWN_FLAGS.items():
        named = [f"--{name.replace('_', '-')} {value}" for name, value in differing.items() if name.startswith(prefix)]
        if named and turns_on not in differing:
            needs = turns_on.replace("_", "-")
            out.append(f"{', '.join(named)}: no effect without --{needs}, and this plugin does not read it; remove it")
    return out


def format_problems(cfg: Any, model_config: Any) -> list[str]:
    """Why SGLang cannot load experts with the launch's quantisation."""
    quantization = cfg.quantization or model_config.quantization
    reason = QUANTIZATIONS.get(quantization)
    return [] if reason is None else [f"--quantization {quantization}: cannot be combined with {_N}: {reason}"]


def _differing(server_args: Any) -> dict[str, Any]:
    """The arguments that differ from SGLang's defaults."""
    fields = msgspec.structs.fields(ServerArgs)
    return {f.name: value for f in fields if (value := getattr(server_args, f.name, f.default)) != f.default}


def _load_format(given: str | None) -> tuple[bool, str]:
    return given in LOAD_FORMATS, LOAD_FORMATS.get(given or "", "")


def _named_experts(config: RequestedConfig, cfg: Any) -> list[str]:
    """Always-resident experts stay in VRAM on whichever rank holds them, so their size must be known at load."""
    if config.resident_ids is None or not cfg.enable_eplb:
        return []
    return [
        f"--enable-eplb: cannot be combined with {flag_name('resident_ids')}: EPLB changes which rank holds an expert and how "
        "many copies exist, so the VRAM for the named experts has no upper bound; remove one of the two"
    ]

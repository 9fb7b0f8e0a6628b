"""SGLang's settings that offloading cannot be combined with."""

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

NO_EXPERTS = "SGLang's loader of it finds no parameter for an expert: it looks for one by the expert's name in the checkpoint"

_OWN_OFFLOAD = "it moves the same weights out of VRAM in its own way"

LOAD_FORMATS = {
    "bitsandbytes": NO_EXPERTS,
    "expert_pack": _OWN_OFFLOAD,
    "flash_rl": "SGLang loads no model with experts by it, but dense ones of Qwen2 and Qwen3",
    "gguf": "GGUF experts get their memory one by one as they are read, of sizes that are not known before",
    "layered": "SGLang loads no model with experts by it, and what it builds has no memory that could be offloaded",
    "remote_instance": "it sends weights from addresses registered for RDMA, and CUDA registers no unified memory for that",
}
"""The refused ones, each with the reason. GPUDirect RDMA's documentation does not list unified memory."""

QUANTIZATIONS = {"bitsandbytes": NO_EXPERTS}
"""The refused ones, each with the reason."""


def problems(config: RequestedConfig, cfg: Any) -> list[str]:
    """Why SGLang's resolved arguments ``cfg`` cannot be served with ``config``."""
    refused = {
        "--enable-paged-experts": (cfg.enable_paged_experts, _OWN_OFFLOAD),
        "--cpu-offload-gb": (cfg.cpu_offload_gb, _OWN_OFFLOAD),
        "--offload-group-size": (cfg.offload_group_size is not None and cfg.offload_group_size > 0, _OWN_OFFLOAD),
        "--kt-method / --kt-weight-path": (
            cfg.kt_weight_path,
            "KTransformers computes experts on the CPU, from memory of its own",
        ),
        "--enable-two-batch-overlap": (cfg.enable_two_batch_overlap, "two half batches are then in different layers at once"),
        "--enable-pdmux": (
            cfg.enable_pdmux,
            "prefill and decode steps then run at the same time, and none is between two steps",
        ),
        "--use-ray": (cfg.use_ray, "its actors load no plugins"),
        "--enable-nvidia-megakernel": (
            cfg.enable_nvidia_megakernel,
            "it computes whole steps without SGLang's FusedMoE layers",
        ),
        "--weight-cache-mode": (
            cfg.weight_cache_mode not in (None, "off"),
            "it shares weights between processes by CUDA IPC, which takes no unified memory",
        ),
        "--elastic-ep-backend": (
            cfg.elastic_ep_backend,
            "it fetches experts into memory registered for RDMA, and CUDA registers no unified memory for that",
        ),
        "--dwdp-size": ((cfg.dwdp_size or 1) > 1, "it moves experts to pages of its own, which other GPUs read"),
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": (
            cfg.moe_a2a_backend in OWN_PATH_A2A,
            "it computes experts by one kernel of its own, from copies in its own layout",
        ),
        f"--load-format {cfg.load_format}": _load_format(cfg.load_format),
        f"--speculative-draft-load-format {cfg.speculative_draft_load_format}": _load_format(cfg.speculative_draft_load_format),
        "--remote-instance-weight-loader-start-seed-via-transfer-engine": (
            cfg.remote_instance_weight_loader_start_seed_via_transfer_engine,
            LOAD_FORMATS["remote_instance"],
        ),
        "SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT": (
            compat.swaps_expert_memory(),
            "it moves each layer's experts into another layer's memory between prefill and decode",
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
    """What can record no trace of the routing, with the reason."""
    parts = "no rank sees the routing of whole steps"
    return {
        f"--ep-size {cfg.ep_size}": (cfg.ep_size > 1, parts),
        f"--pp-size {cfg.pp_size}": (cfg.pp_size > 1, parts),
        "--enable-dp-attention / --attn-dp-size": (cfg.attn_dp_size > 1, parts),
        f"--moe-a2a-backend {cfg.moe_a2a_backend}": (cfg.moe_a2a_backend != "none", parts),
        f"--attn-cp-size {cfg.attn_cp_size}": (cfg.attn_cp_size > 1, parts),
        f"--moe-dp-size {cfg.moe_dp_size}": (cfg.moe_dp_size > 1, parts),
        f"--speculative-algorithm {cfg.speculative_algorithm}": (
            cfg.speculative_algorithm,
            "its steps verify several draft tokens per request and reject some",
        ),
        f"--dllm-algorithm {cfg.dllm_algorithm}": (cfg.dllm_algorithm, "it decodes blocks, not tokens"),
    }


OWN_FLAGS = {"kt_": "kt_weight_path", "paged_experts_": "enable_paged_experts", "offload_": "offload_group_size"}
"""SGLang's own kinds of offloading: the prefix of their arguments, and the argument that turns each on."""


def ignored(server_args: Any) -> list[str]:
    """Arguments of SGLang's own kinds of offloading that have no effect. The others are refused."""
    differing, out = _differing(server_args), []
    for prefix, turns_on in OWN_FLAGS.items():
        named = [f"--{name.replace('_', '-')} {value}" for name, value in differing.items() if name.startswith(prefix)]
        if named and turns_on not in differing:
            needs = turns_on.replace("_", "-")
            out.append(f"{', '.join(named)}: SGLang ignores it without --{needs}, and this plugin does not read it; remove it")
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
    """Experts that a flag names stay in VRAM on whichever rank has them, so their VRAM must be known at load."""
    if config.resident_ids is None or not cfg.enable_eplb:
        return []
    return [
        f"--enable-eplb: cannot be combined with {flag_name('resident_ids')}: it changes which rank holds an expert, and in "
        "how many copies, so the VRAM that named experts take on a rank has no bound; leave out one or the other"
    ]

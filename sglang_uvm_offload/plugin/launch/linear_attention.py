"""The per-request state of models with linear attention, in SGLang's own shapes."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape, mamba2_state_dtype

from sglang_uvm_offload.sizing.linear_state import LinearState


def has_states(model: Any) -> bool:
    return mambaish_config(model) is not None


def uncounted(cfg: Any, model: Any) -> list[str]:
    """Why the planner cannot count the state."""
    if not has_states(model):
        return []
    if not hasattr(hybrid_gdn_config(model), "linear_conv_kernel_dim"):
        return ["does not count the state of this model's linear attention, only that of Qwen3-Next and Qwen3.5"]
    beside = {
        f"--speculative-algorithm {cfg.speculative_algorithm}": cfg.speculative_algorithm is not None,
        "--enable-linear-replayssm": cfg.enable_linear_replayssm,
        "--enable-int8-mamba-checkpoint": cfg.enable_int8_mamba_checkpoint,
        "--enable-unified-memory": cfg.enable_unified_memory,
    }
    return [f"does not count the state of linear attention with {name}" for name, enabled in beside.items() if enabled]


def state(cfg: Any, model: Any) -> LinearState | None:
    """The state of one request and the number of states that SGLang keeps; None if ``uncounted`` names a reason, or for a model
    without linear attention."""
    if not has_states(model) or uncounted(cfg, model):
        return None
    return LinearState(
        state_layer_bytes(hybrid_gdn_config(model), cfg.mamba_ssm_dtype),
        cfg.mamba_full_memory_ratio,
        slots=_slots(cfg),
        **({"slots_per_request": 1} if cfg.disable_radix_cache else {}),
    )


def state_layer_bytes(config: Any, ssm_dtype: str | None) -> int:
    """Bytes of one request in one layer over all ranks, for a config with Qwen3-Next's names. Its ``mamba2_cache_params`` is
    not available before ranks exist."""
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=config.linear_value_head_dim * config.linear_num_value_heads,
        n_groups=config.linear_num_key_heads,
        num_heads=config.linear_num_value_heads,
        head_dim=config.linear_value_head_dim,
        state_size=config.linear_key_head_dim,
        conv_kernel=config.linear_conv_kernel_dim,
    )
    dtype = mamba2_state_dtype(config)
    if ssm_dtype is not None:
        dtype = Mamba2StateDType(conv=dtype.conv, temporal=getattr(torch, ssm_dtype))
    return Mamba2CacheParams(shape=shape, layers=[0], dtype=dtype).mamba_cache_per_req


def _slots(cfg: Any) -> int | None:
    """The number of states of one rank, if flags set it."""
    if cfg.max_mamba_cache_size is not None:
        return cfg.max_mamba_cache_size // cfg.attn_dp_size
    if cfg.disable_radix_cache and cfg.max_running_requests is not None:
        return max(1, cfg.max_running_requests // cfg.attn_dp_size)
    return None

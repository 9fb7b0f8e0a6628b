"""Where SGLang keeps a launch's lookup tables, by its flags and variables."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from sglang_uvm_offload.plugin.compat import VERSION
from sglang_uvm_offload.sizing.lookup_tables import BACKENDS, PLE_CLASS, REGISTERED, VRAM


def tables_in(cfg: Any, model: Any) -> str:
    """``cfg`` is resolved: for Qwen4-Exp, SGLang turns its flag on by default."""
    if PLE_CLASS in (model.hf_config.architectures or []):
        return BACKENDS[cfg.ple_offload_backend] if cfg.ple_offload_embedding else VRAM
    if VERSION < (0, 5, 23) or not getattr(model.hf_config, "engram_layer_ids", None):
        return VRAM
    # Shards that each rank maps of the others are in VRAM, whatever the other variable says.
    if envs.SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS.get():
        return VRAM
    return REGISTERED if envs.SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE.get() else VRAM


def keeps_tables_by_group(cfg: Any) -> bool:
    """Whether each attention group of Qwen4-Exp has an n-gram table of its own (``_use_attn_tp_ngram``)."""
    return VERSION >= (0, 5, 23) and cfg.attn_dp_size > 1 and envs.SGLANG_USE_ATTN_TP_NGRAM.get()

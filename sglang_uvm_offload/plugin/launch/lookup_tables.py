"""Where a launch keeps its lookup tables, from SGLang's flags and variables and this plugin's flag."""

from __future__ import annotations

from typing import Any

from sglang.srt.environ import envs

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.plan.lookup_tables import BACKENDS, MANAGED, PLE_CLASS, PLE_FLAG, REGISTERED, TABLES_FLAG, VRAM
from sglang_uvm_offload.plugin.compat import maps_engram_shards


def tables_in(cfg: Any, model: Any, in_host: bool) -> str:
    """The kind of memory that holds the tables. ``cfg`` must be resolved, because SGLang enables its flag for Qwen4-Exp by
    default. ``in_host`` is ``Settings.tables_in_host``."""
    if PLE_CLASS in (model.hf_config.architectures or []):
        return BACKENDS[cfg.ple_offload_backend] if cfg.ple_offload_embedding else VRAM
    if _has_ngrams(model):
        return MANAGED if in_host else VRAM
    if not getattr(model.hf_config, "engram_layer_ids", None):
        return VRAM
    # Shards that ranks map from each other stay in VRAM, regardless of the other variable.
    if maps_engram_shards():
        return VRAM
    return REGISTERED if envs.SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE.get() else VRAM


def problems(requested: Settings, model: Any) -> list[str]:
    """Why ``lookup_tables`` ``host`` applies to no table."""
    if not requested.tables_in_host or _has_ngrams(model):
        return []
    architectures = model.hf_config.architectures or []
    own = f"use SGLang's own flag for its tables, {PLE_FLAG}" if PLE_CLASS in architectures else "remove it"
    return [f"{TABLES_FLAG} host: the model ({', '.join(architectures)}) has no LongCat-style n-gram embedding; {own}"]


def _has_ngrams(model: Any) -> bool:
    """Whether SGLang builds an ``NgramEmbedding``."""
    return bool(getattr(model.hf_config, "use_ngram_embedding", False))

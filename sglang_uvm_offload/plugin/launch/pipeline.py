"""How SGLang splits a launch's decoder layers among its pipeline stages."""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed.utils import get_pp_indices


def stages(cfg: Any, model: Any) -> tuple[range, ...]:
    """The decoder layers of each stage: equal parts, or those in ``SGLANG_PP_LAYER_PARTITION``."""
    layers = model.hf_text_config.num_hidden_layers
    return tuple(range(*get_pp_indices(layers, stage, cfg.pp_size)) for stage in range(cfg.pp_size))

"""The quantisation config that a checkpoint states."""

from __future__ import annotations

from typing import Any


def stated_quantization(model_config: Any) -> dict[str, Any]:
    """From the same sources as SGLang 0.5.23 (``resolve_checkpoint_quant_spec``); empty for a checkpoint that states none."""
    whole, text = model_config.hf_config, model_config.hf_text_config
    places = ((whole, "quantization_config"), (text, "quantization_config"), (whole, "compression_config"))
    found = (getattr(config, name, None) for config, name in places)
    return next((each for each in found if each and isinstance(each, dict)), {})

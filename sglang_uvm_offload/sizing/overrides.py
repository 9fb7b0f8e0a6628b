"""A config as ``--json-model-override-args`` changes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MERGED = (
    *("thinker_config", "llm_config", "language_config", "text_config", "vision_config", "audio_config"),
    *("rope_scaling", "rope_parameters"),
)
"""Parts of a config that have classes of their own, and what SGLang merges with them."""


def overridden(config: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """``config`` with the values of the JSON object ``arguments``, as SGLang 0.5.23 sets them (``hf_transformers.get_config``):
    those of a part of a model go into that part, and the rest replaces what was there."""
    values: dict[str, Any] = json.loads(arguments or "{}")
    out = dict(config)
    for name, value in values.items():
        merges = name in _MERGED and isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = {**out[name], **value} if merges else value
    return out

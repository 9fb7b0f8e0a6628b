"""A config as ``--json-model-override-args`` changes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MERGED = ("rope_scaling", "rope_parameters")


def overridden(config: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """``config`` with the values of the JSON object ``arguments``, as SGLang 0.5.23 sets them (``hf_transformers.get_config``):
    those of a part of a model go into that part, and the rest replaces what was there."""
    values: dict[str, Any] = json.loads(arguments or "{}")
    out = dict(config)
    for name, value in values.items():
        merges = isinstance(value, dict) and isinstance(out.get(name), dict)
        merges = merges and (name in _MERGED or (name.endswith("_config") and name not in _OF_NO_CLASS))
        out[name] = {**out[name], **value} if merges else value
    return out


_OF_NO_CLASS = ("quantization_config", "compression_config")
"""Parts of a config that stay plain objects."""

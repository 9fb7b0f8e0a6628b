"""Makes SGLang's arguments and model config as a launch on CUDA reads them, in this process and without a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

from builders.true_shape import config_folder
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.plugin.compat import resolving_view

MODEL = str(config_folder("Qwen/Qwen3-30B-A3B"))


def arguments(**fields: Any) -> Any:
    """Makes arguments from ``fields`` as ``sglang.Engine`` does, before they are resolved."""
    return ServerArgs(**{"model_path": MODEL, "device": "cuda", **fields})


def launch(stated: Mapping[str, Any] | None = None, **fields: Any) -> tuple[Any, Any]:
    """Returns the view of these arguments, and their model's config, in which ``stated`` replaces its own values."""
    given = arguments(json_model_override_args=json.dumps(stated or {}), **fields)
    with mock.patch.dict(QUANTIZATION_METHODS, mxfp4=Mxfp4Config):  # SGLang registers it only with a GPU
        return resolving_view(given), model_config_of(given)


def resolved_args(**fields: Any) -> Any:
    """Returns the arguments as SGLang resolves them."""
    given = arguments(skip_tokenizer_init=True, **fields)
    with mock.patch.dict(os.environ):  # resolving sets variables
        given.resolve_once()
    return given


def resolved(**fields: Any) -> Any:
    """Returns the view of ``resolved_args``."""
    return resolving_view(resolved_args(**fields))

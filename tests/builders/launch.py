"""SGLang's arguments and config of a model as a launch on CUDA reads them, made in this process, which needs no GPU."""

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
    """As ``sglang.Engine`` makes them of ``fields``, before they are resolved."""
    return ServerArgs(**{"model_path": MODEL, "device": "cuda", **fields})


def launch(stated: Mapping[str, Any] | None = None, **fields: Any) -> tuple[Any, Any]:
    """The view of these arguments, and the config of their model with what is ``stated`` in place of its own."""
    given = arguments(json_model_override_args=json.dumps(stated or {}), **fields)
    with mock.patch.dict(QUANTIZATION_METHODS, mxfp4=Mxfp4Config):  # which SGLang knows only where there is a GPU
        return resolving_view(given), model_config_of(given)


def resolved_args(**fields: Any) -> Any:
    """These arguments once SGLang has resolved them."""
    given = arguments(skip_tokenizer_init=True, **fields)
    with mock.patch.dict(os.environ):  # which it sets as it resolves
        given.resolve_once()
    return given


def resolved(**fields: Any) -> Any:
    """The view of ``resolved_args``."""
    return resolving_view(resolved_args(**fields))

"""A model on the Hugging Face Hub: its config.json, and the headers of its weights where the config does not tell them.

No weights are fetched. ``huggingface_hub``, which SGLang brings, downloads, and keeps what it has in its cache.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sglang_uvm_offload.sizing.checkpoint import CheckpointShape, from_config, from_tensors
from sglang_uvm_offload.sizing.quantization import BESIDE, quantization_of, with_beside
from sglang_uvm_offload.sizing.quantized_linear import UnknownTensors
from sglang_uvm_offload.sizing.safetensors_header import DTYPE_BITS, CheckpointError, TensorInfo, read_json

LONGEST_REASON = 200


def is_id(name: str) -> bool:
    """Whether ``name`` could be an id: ``owner/model``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def load(name: str) -> CheckpointShape:
    """The model with the id ``name``. Raises ``CheckpointError``, which names the way without this machine's network."""
    config = read_json(_config(name))
    if not quantization_of(config):
        config = with_beside(config, _beside(name))
    try:
        return from_config(name, config)
    except UnknownTensors:
        return from_tensors(name, config, _headers(name), from_headers=True)


def _config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # HTTP, offline mode, a gated model, the cache's disk: the same step helps
        raise CheckpointError(
            f"{name}: there is no such path, and its config.json cannot be read from the Hugging Face Hub ({_reason(error)}); "
            f"run hf download {name} config.json --local-dir DIR where that works, and give DIR/config.json"
        ) from error


def _beside(name: str) -> dict[str, Any] | None:
    """ModelOpt's file with the quantisation; None if the model has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return read_json(Path(hf_hub_download(name, BESIDE)))
    except Exception as error:  # as above
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        raise CheckpointError(
            f"{name}: its config.json states no quantisation, and whether it has a {BESIDE}, which would, cannot be read from "
            f"the Hugging Face Hub ({_reason(error)}); run hf download {name} --include '*.json' --local-dir DIR where that "
            "works, and give DIR/config.json"
        ) from error


def _headers(name: str) -> list[TensorInfo]:
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # as above, and for a model without safetensors files
        raise CheckpointError(
            f"{name}: its config.json does not tell which tensors it has, and the headers of its weights cannot be read from "
            f"the Hugging Face Hub ({_reason(error)}); run hf download {name} --local-dir DIR where that works, and give DIR"
        ) from error
    tensors = [TensorInfo(key, str(one.dtype), tuple(one.shape)) for file in files for key, one in file.tensors.items()]
    if unknown := {tensor.dtype for tensor in tensors} - DTYPE_BITS.keys():
        raise CheckpointError(f"{name}: has tensors of type {min(unknown)}, whose size is unknown")
    return tensors


def _reason(error: Exception) -> str:
    """The first sentence of what went wrong."""
    sentence = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {sentence}"[:LONGEST_REASON]

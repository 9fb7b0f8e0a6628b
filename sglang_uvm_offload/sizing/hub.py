"""A model on the Hugging Face Hub: its config.json, and the headers of its weights, which are read by range.

No weights are fetched. ``huggingface_hub``, which SGLang brings, downloads, and keeps the small files in its cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sglang_uvm_offload.sizing.quantization import BESIDE, quantization_of
from sglang_uvm_offload.sizing.safetensors_header import DTYPE_BITS, CheckpointError, TensorInfo, read_json

LONGEST_REASON = 200


class Unseen(CheckpointError):
    """What cannot be read from the Hub: the network is gone, offline mode is on, the model is gated or has no such files."""


def is_id(name: str) -> bool:
    """Whether ``name`` could be an id: ``owner/model``."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None


def snapshot(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder of what was downloaded of a model, complete or not; None without any."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def offline() -> bool:
    """Whether the user forbids ``huggingface_hub`` the network, so that what is downloaded is all there is."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def config_file(name: str, revision: str | None = None) -> Path:
    """The model's config.json, with the other files that say how its weights are stored. Raises ``Unseen``."""
    found: Path = _asked(_config_file, name, revision)
    return found


def headers(name: str, revision: str | None = None) -> tuple[TensorInfo, ...]:
    """The tensors of the model's safetensors files. Raises ``Unseen``."""
    found: tuple[TensorInfo, ...] = _asked(_headers, name, revision)
    return found


def _asked(question: Callable[..., Any], name: str, revision: str | None) -> Any:
    answer = _answer(question, name, revision)
    if isinstance(answer, Unseen):
        raise answer
    return answer


@cache  # a launch asks several times; a large model has hundreds of files, and a network that is gone takes long to say so
def _answer(question: Callable[..., Any], name: str, revision: str | None) -> Any:
    try:
        return question(name, revision)
    except Unseen as unseen:
        return unseen


def _config_file(name: str, revision: str | None) -> Path:
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        config = Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # HTTP, offline mode, a gated model, the cache's disk: the same step helps
        raise Unseen(
            f"{name}: there is no such path, and its config.json cannot be read from the Hugging Face Hub ({_reason(error)}); "
            f"run hf download {name} config.json --local-dir DIR where that works, and give DIR/config.json"
        ) from error
    try:
        hf_hub_download(name, BESIDE, revision=revision)
    except Exception as error:  # as above
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        absent = absent or try_to_load_from_cache(name, BESIDE, revision=revision) is _CACHED_NO_EXIST
        if not absent and not quantization_of(read_json(config)):
            raise Unseen(
                f"{name}: its config.json states no quantisation, and whether it has a {BESIDE}, which would, cannot be read "
                f"from the Hugging Face Hub ({_reason(error)}); run hf download {name} --include '*.json' --local-dir DIR "
                "where that works, and give DIR/config.json"
            ) from error
    return config


def _headers(name: str, revision: str | None) -> tuple[TensorInfo, ...]:
    from huggingface_hub import get_safetensors_metadata

    try:
        found = get_safetensors_metadata(name, revision=revision)
    except Exception as error:  # as above, and for a model without safetensors files
        raise Unseen(
            f"{name}: its weights are not on this machine, and their headers cannot be read from the Hugging Face Hub "
            f"({_reason(error)}); run hf download {name} --local-dir DIR where that works, and give DIR"
        ) from error
    tensors = tuple(
        TensorInfo(key, str(one.dtype), tuple(one.shape))
        for file, held in sorted(found.files_metadata.items())
        for key, one in held.tensors.items()
        if found.weight_map.get(key) == file
    )
    if unknown := {tensor.dtype for tensor in tensors} - DTYPE_BITS.keys():
        raise CheckpointError(f"{name}: has tensors of type {min(unknown)}, whose size is unknown")
    return tensors


def _reason(error: Exception) -> str:
    """The first sentence of what went wrong."""
    sentence = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {sentence}"[:LONGEST_REASON]

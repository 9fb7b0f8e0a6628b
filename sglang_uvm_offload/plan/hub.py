"""The config.json of a model on the Hugging Face Hub.

``huggingface_hub``, which SGLang brings, downloads it, and keeps it in its cache.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from sglang_uvm_offload.plan.engine_shape import BESIDE
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, read_json

LONGEST_REASON = 200


class Unseen(CheckpointError):
    """What cannot be read from the Hub: the network is gone, offline mode is on, the model is gated or has no such file."""


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


@cache  # doctor asks several times, and a network that is gone takes long to say so
def _answer(name: str, revision: str | None) -> Path | Unseen:
    try:
        return _downloaded(name, revision)
    except Unseen as unseen:
        return unseen


def _downloaded(name: str, revision: str | None) -> Path:
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    try:
        found = Path(hf_hub_download(name, "config.json", revision=revision))
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
        if not absent and not _states_quantization(read_json(found)):
            raise Unseen(
                f"{name}: its config.json states no quantisation, and whether it has a {BESIDE}, which would, cannot be read "
                f"from the Hugging Face Hub ({_reason(error)}); run hf download {name} --include '*.json' --local-dir DIR "
                "where that works, and give DIR/config.json"
            ) from error
    return found


def _states_quantization(config: dict[str, Any]) -> bool:
    """In one of SGLang's places (``resolve_checkpoint_quant_spec``)."""
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    return any(part.get(name) for part in parts for name in ("quantization_config", "compression_config"))


def _reason(error: Exception) -> str:
    """The first sentence of what went wrong."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0]}"[:LONGEST_REASON]


def config_file(name: str, revision: str | None = None) -> Path:
    """The model's config.json, with the other files that say how its weights are stored. Raises ``Unseen``."""
    answer = _answer(name, revision)
    if isinstance(answer, Unseen):
        raise answer
    return answer

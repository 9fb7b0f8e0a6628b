"""A program that downloads a model's config.json from the Hugging Face Hub and prints its path as JSON:
``NAME REVISION CACHE``, with "" for the default revision.

It runs as a separate process, which ``hub`` can stop: a server may send slowly and without end.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from sglang_uvm_offload.plan.engine_shape import BESIDE
from sglang_uvm_offload.plan.hub import Unseen, unread
from sglang_uvm_offload.plan.safetensors_header import MAX_JSON_BYTES, CheckpointError, read_json

LONGEST_REASON = 200


def main() -> None:
    name, revision, os.environ["HF_HUB_CACHE"] = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_JSON_BYTES, MAX_JSON_BYTES))  # of any file, however it is downloaded
    try:
        answer = {"config": config(name, revision or None)}
    except CheckpointError as unseen:
        answer = {"unseen": str(unseen)}
    print(json.dumps(answer))


def config(name: str, revision: str | None) -> str:
    """The path of the model's config.json, with the other files that say how its weights are stored beside it."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        found = hf_hub_download(name, "config.json", revision=revision)
    except Exception as error:  # HTTP, offline mode, a gated model, the cache's disk: the same step helps
        raise unread(name, _reason(error)) from error
    try:
        hf_hub_download(name, BESIDE, revision=revision)
    except Exception as error:  # as above; it is not needed where config.json states the quantisation itself
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        absent = absent or try_to_load_from_cache(name, BESIDE, revision=revision) is _CACHED_NO_EXIST
        if not absent and not _states_quantization(read_json(Path(found))):
            raise Unseen(
                f"{name}: its config.json states no quantisation, and whether it has a {BESIDE}, which would, cannot be read "
                f"from the Hugging Face Hub ({_reason(error)}); run hf download {name} --include '*.json' --local-dir DIR "
                "where that works, and give DIR/config.json"
            ) from error
    return str(found)


def _states_quantization(config: dict[str, Any]) -> bool:
    """Whether the config has the entry where SGLang looks for it (``resolve_checkpoint_quant_spec``)."""
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    return any(part.get(name) for part in parts for name in ("quantization_config", "compression_config"))


def _reason(error: Exception) -> str:
    """The first sentence of the error, or what it means."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"it is larger than {MAX_JSON_BYTES >> 20} MiB"
    unseen = isinstance(error, (LocalEntryNotFoundError, RepositoryNotFoundError))
    if unseen and not isinstance(error, GatedRepoError):  # whose own words say what to do
        return "no connection to the Hub, or no such model"
    sentence = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {sentence}"[:LONGEST_REASON]


if __name__ == "__main__":
    main()

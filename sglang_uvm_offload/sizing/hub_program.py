"""A program that asks the Hugging Face Hub about a model, and prints the answer as JSON: ``config NAME REVISION CACHE`` or
``headers NAME REVISION CACHE``, with "" for the default revision.

It runs as a process of its own, which ``hub`` can end: a server may send without end, and slowly.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from pathlib import Path

from sglang_uvm_offload.sizing.hub import CONFIG, HEADERS, Unseen, unread
from sglang_uvm_offload.sizing.quantization import BESIDE, quantization_of
from sglang_uvm_offload.sizing.safetensors_header import DTYPE_BITS, MAX_JSON_BYTES, CheckpointError, read_json

LONGEST_REASON = 200
Tensors = list[tuple[str, str, list[int]]]


def main() -> None:
    what, name, revision, os.environ["HF_HUB_CACHE"] = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_JSON_BYTES, MAX_JSON_BYTES))  # of any file, however it is downloaded
    try:
        found = config(name, revision or None) if what == CONFIG else headers(name, revision or None)
        answer: dict[str, str | Tensors] = {what: found}
    except Unseen as unseen:
        answer = {"unseen": str(unseen)}
    except CheckpointError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer))


def config(name: str, revision: str | None) -> str:
    """The path of the model's config.json, with the other files that say how its weights are stored beside it."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        found = hf_hub_download(name, "config.json", revision=revision)
    except Exception as error:  # HTTP, offline mode, a gated model, the cache's disk: the same step helps
        raise unread(CONFIG, name, _reason(error)) from error
    try:
        hf_hub_download(name, BESIDE, revision=revision)
    except Exception as error:  # as above
        absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
        absent = absent or try_to_load_from_cache(name, BESIDE, revision=revision) is _CACHED_NO_EXIST
        if not absent and not quantization_of(read_json(Path(found))):
            raise Unseen(
                f"{name}: its config.json states no quantisation, and whether it has a {BESIDE}, which would, cannot be read "
                f"from the Hugging Face Hub ({_reason(error)}); run hf download {name} --include '*.json' --local-dir DIR "
                "where that works, and give DIR/config.json"
            ) from error
    return str(found)


def headers(name: str, revision: str | None) -> Tensors:
    """Name, type and shape of each tensor of the model's safetensors files."""
    from huggingface_hub import get_safetensors_metadata

    try:
        found = get_safetensors_metadata(name, revision=revision)
    except Exception as error:  # as above, and for a model without safetensors files
        raise unread(HEADERS, name, _reason(error)) from error
    tensors = [
        (key, str(one.dtype), list(one.shape))
        for file, held in sorted(found.files_metadata.items())
        for key, one in held.tensors.items()
        if found.weight_map.get(key) == file
    ]
    if unknown := {dtype for _, dtype, _ in tensors} - DTYPE_BITS.keys():
        raise CheckpointError(f"{name}: has tensors of type {min(unknown)}, whose size is unknown")
    return tensors


def _reason(error: Exception) -> str:
    """The first sentence of what went wrong."""
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return f"it is larger than {MAX_JSON_BYTES >> 20} MiB"
    sentence = " ".join(str(error).split()).partition(". ")[0]
    return f"{type(error).__name__}: {sentence}"[:LONGEST_REASON]


if __name__ == "__main__":
    main()

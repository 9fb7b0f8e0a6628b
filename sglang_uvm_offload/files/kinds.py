"""What a file is, for the command that was given the wrong one. Reads a bounded part of it, and unpickles nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang_uvm_offload.files import conversion, npz, reading

MAX_JSON_BYTES = 64 << 20
"""A larger file is judged by its first line."""
MAX_TEXT_BYTES = 1 << 12
"""How much of a file decides whether it is text."""
MAX_PICKLE_BYTES = 1 << 20
"""How much of a .pt file's pickle is searched for names."""


class FileKind(NamedTuple):
    """``what`` it is, as in "this is a trace", which command reads it ("" for none), and how to convert it."""

    what: str
    command: str = ""
    remedy: str = ""


TRACE = FileKind("a routing trace", "replay")
PROFILE = FileKind("a routing profile", "profile")
SERVER_INFO = FileKind("a saved /server_info", "report")
STATISTICS = FileKind("the statistics of a server", "report")
REPLAYED = FileKind("the output of replay --json", "report")
CONFIG = FileKind("the configuration of a model", "plan")
CHECKPOINT = FileKind("a checkpoint folder", "plan")
_UNKNOWN = "text"
"""In place of the command that reads a text file of no known kind: ``plan`` and ``report`` say themselves what they miss."""

NO_GGUF = "this plugin cannot serve GGUF; give `plan` the config.json of an AWQ, GPTQ, FP8 or FP4 version of the model"

_MAGIC = (
    (b"GGUF", FileKind("a GGUF file", remedy=NO_GGUF)),
    (b"PAR1", FileKind("a Parquet file", remedy=conversion.BY_HAND)),
    (b"\x1f\x8b", FileKind("a gzip archive", remedy="unpack it first")),
    (b"\x28\xb5\x2f\xfd", FileKind("a zstd archive", remedy="unpack it first")),
    (b"<", FileKind("an HTML or XML page")),
    (b"\x80", FileKind("a pickle, which may run code and is not loaded", remedy=conversion.BY_HAND)),
)


def mistaken(path: str | os.PathLike[str], command: str) -> str:
    """Why ``command`` cannot use ``path``, where that is another kind of file: a sentence, and maybe a line with the command
    that converts it. "" if the kind is unknown, or the one that ``command`` reads."""
    kind = kind_of(Path(path))
    if kind is None or kind.command == command or (kind.command == _UNKNOWN and command in ("plan", "report")):
        return ""
    read_by = f"; `{kind.command}` reads it" if kind.command not in ("", _UNKNOWN) else ""
    helps = kind.remedy and (
        command == "replay" or "`plan`" in kind.remedy or (command == "profile" and conversion.BY_HAND not in kind.remedy)
    )
    return f"this is {kind.what}{read_by}" + (f"; {kind.remedy}" if helps else "")


def kind_of(path: Path) -> FileKind | None:
    """None if it is unknown, or cannot be opened."""
    try:
        if path.is_dir():
            return _of_folder(path)
        with reading.open_regular(path) as file:
            head = file.read(16)
        if head.startswith(b"PK\x03\x04"):
            return _of_zip(path)
        if head.startswith(npz.NPY_MAGIC):
            return _of_npy(path)
        if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 32:
            return FileKind("a safetensors file", remedy="give `plan` the checkpoint's folder")
        known = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
        return known or _of_json(path)
    except (OSError, ValueError, RecursionError):
        return None


def _of_folder(path: Path) -> FileKind | None:
    names = os.listdir(path)
    checkpoint = "config.json" in names or any(name.endswith(".safetensors") for name in names)
    if not checkpoint and any(name.endswith(".gguf") for name in names):
        return FileKind("a folder with GGUF files", remedy=NO_GGUF)
    return CHECKPOINT if checkpoint else None


def _of_zip(path: Path) -> FileKind | None:
    names = npz.names(path)
    if {"ids", "seq_len", "num_experts"} <= names:
        return TRACE
    if {"about", "counts", "steps"} <= names:
        return PROFILE
    if any(name.endswith("/data.pkl") for name in names):
        return _of_pytorch(path)
    arrays = npz.shapes(path)
    listed = ", ".join(f"{name} {array}" for name, array in list(arrays.items())[:8])
    return FileKind(f"an npz file with {listed or 'no array'}", remedy=conversion.of_npz(path, arrays))


def _of_npy(path: Path) -> FileKind:
    with reading.open_regular(path) as file:
        array = npz.shape_of(file)
    return FileKind(f"a NumPy array {array}", remedy=conversion.of_npy(path, array))


def _of_pytorch(path: Path) -> FileKind:
    """By the names in its pickle, which is searched and not loaded."""
    text = npz.beginning(path, "/data.pkl", MAX_PICKLE_BYTES)
    if b"logical_count" in text:
        return FileKind("a .pt file with SGLang's expert counts", remedy=conversion.of_pt_counts(path))
    if b"topk_ids_of_layer" in text:
        return FileKind("a .pt file with SGLang's routing by token", remedy=conversion.of_pt_records(path))
    return FileKind("a PyTorch file", remedy=conversion.BY_HAND)


def _of_json(path: Path) -> FileKind | None:
    with reading.open_regular(path) as file:
        data = file.read(MAX_TEXT_BYTES)
        if data.lstrip()[:1] not in (b"{", b"["):
            plain = data and all(letter.isprintable() or letter.isspace() for letter in data.decode(errors="replace"))
            return FileKind("a text file", _UNKNOWN, conversion.BY_HAND) if plain else None
        data += file.read(MAX_JSON_BYTES + 1 - len(data))
    value, lines = _first_value(data)
    if routed := conversion.of_json(path, value, lines):
        return FileKind(*routed)
    found = value if isinstance(value, dict) else {}
    if lines or not found:
        keys = ", ".join(map(str, list(found)[:8])) or f"{type(value).__name__}s"
        form = "JSON lines" if lines else "JSON"
        return FileKind(f"{form} with {keys}", _UNKNOWN, conversion.BY_HAND)
    return _of_object(found)


def _first_value(data: bytes) -> tuple[Any, bool]:
    """The JSON value of a file and False, or that of its first line and True. Of a list too long to be read whole, the first
    element as a list. Raises ``ValueError``."""
    try:
        return json.loads(data), False
    except ValueError:
        text = data.decode(errors="replace").lstrip()
        if len(data) > MAX_JSON_BYTES and text.startswith("["):
            return [json.JSONDecoder().raw_decode(text[1:].lstrip())[0]], False
        return json.loads(text.partition("\n")[0]), True


def _of_object(found: Mapping[str, Any]) -> FileKind:
    config = found.get("config", found)
    if isinstance(config, dict) and ("architectures" in config or "model_type" in config):
        return CONFIG
    if "weight_map" in found:
        return FileKind("the index of a checkpoint's weights", remedy="give `plan` its folder")
    if "internal_states" in found:
        return STATISTICS if "format" in found else SERVER_INFO
    if "scored" in found:
        return REPLAYED if "results" in found else FileKind("the output of replay --json, which no command reads")
    if {"machine", "workload", "num_experts"} <= found.keys():
        return FileKind("the output of plan --json, which no command reads")
    return FileKind(f"a JSON object with {', '.join(list(found)[:8])}", _UNKNOWN, conversion.BY_HAND)

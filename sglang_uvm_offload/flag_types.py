"""Flags in Python's own types, as programs give them to ``sglang.Engine``: paths, lists, False, numbers of NumPy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence, Set
from typing import Any

from sglang_uvm_offload.flags import OFF, OffloadFlags

FILES = ("profile", "save_profile", "trace", "stats")
_ABSENT_IF_FALSE = (*FILES, "resident_ids", "slots")


def as_on_the_command_line(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` (by field of ``OffloadFlags``) as the command line would give them, but for lists: of files, a tuple of text;
    of ids by layer, as in a file of ids. None is the default. What has no such form is returned as it is."""
    fields = {f.name: f for f in dataclasses.fields(OffloadFlags)}
    return {name: _value(fields[name], value) for name, value in values.items()}


def _value(field: dataclasses.Field[Any], given: Any) -> Any:
    value = _python(given)
    if value is None:
        return field.default
    if isinstance(value, bool):
        return _switch(field, value)
    if isinstance(value, str):
        return _number(field.metadata["kind"], value)
    if field.name in FILES and isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if field.name == "profile" and _is_list(value):
        return tuple(_file(item) for item in value) or None
    if field.name == "resident_ids":
        return _ids(value)
    return value


def _python(value: Any) -> Any:
    """Numbers and arrays of NumPy, or tensors, as numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _switch(field: dataclasses.Field[Any], on: bool) -> Any:
    word = "on" if on else "off"
    if word in (field.metadata["choices"] or ()):
        return word
    if on:
        return on
    if field.name == "num_resident":
        return OFF
    return None if field.name in _ABSENT_IF_FALSE else on


def _number(kind: type, text: str) -> Any:
    try:
        return text if kind is str else kind(text)
    except ValueError:
        return text


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


def _file(item: Any) -> Any:
    return os.fsdecode(item) if isinstance(item, os.PathLike) else item


def _ids(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return f"@{os.fsdecode(value)}"
    if not _is_list(value):
        return value
    items = [_python(item) for item in (sorted(value) if isinstance(value, Set) else value)]
    if any(map(_is_list, items)):
        return [[_python(i) for i in item] if _is_list(item) else item for item in items]
    return ",".join(map(str, items))

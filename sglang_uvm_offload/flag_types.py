"""The kinds of flag values: from the command line, from JSON, or in Python types, as programs pass them to ``sglang.Engine``
(paths, lists, False, NumPy numbers)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Kind:
    """``read`` converts a value, or raises ``ValueError`` with what would be valid."""

    read: Callable[[Any], Any]
    parser: type = str
    """The type to which SGLang converts the command line's text."""
    choices: tuple[str, ...] | None = None


def plain(value: Any) -> Any:
    """Convert NumPy numbers and arrays, or tensors, to numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def choice(*names: str) -> Kind:
    def read(value: Any) -> str:
        word = ("off", "on")[value] if isinstance(value, bool) else value
        if word in names:
            return str(word)
        quoted = "; in YAML, quote on and off" if str(value).lower() in ("true", "false") else ""
        raise ValueError(f"must be one of {', '.join(names)}{quoted}")

    return Kind(read, choices=names)


def whole(right: str, least: int, most: int, **words: int | None) -> Kind:
    """A whole number, or one of ``words``, which map to their meanings."""

    def read(value: Any) -> int | None:
        if not isinstance(value, bool) and (text := str(value)) in words:
            return words[text]
        return _bounded(value, int, str.isdecimal, least, most, f"{right}, {least} to {most}")

    return Kind(read)


def gib(right: str, parser: type = str, **words: None) -> Kind:
    def read(value: Any) -> float | None:
        if isinstance(value, str) and value in words:
            return words[value]
        return _bounded(value, float, bool, 0, 1024, f"{right} from 0 to 1024")

    return Kind(read, parser)


def _bounded(value: Any, number: type[_Number], like: Callable[[str], bool], least: int, most: int, right: str) -> _Number:
    with contextlib.suppress(ValueError):  # not a number, or one with thousands of digits
        if not isinstance(value, bool) and like(text := str(value)) and least <= number(text) <= most:
            return number(text)
    raise ValueError(f"must be {right}")


def or_off(kind: Kind, off: Any) -> Kind:
    """``kind``, but False means ``off``."""
    return Kind(lambda value: off if value is False else kind.read(value), kind.parser, kind.choices)


def _file(value: Any) -> Path:
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else value
    if not _is_path(text):
        raise ValueError("must be the path of a file")
    return Path(text)


def _is_path(text: Any) -> bool:
    """Whether ``text`` is a valid file name."""
    try:
        return isinstance(text, str) and bool(text.strip()) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _files(value: Any) -> tuple[Path, ...] | None:
    """Files in a list or in comma-separated text."""
    if isinstance(value, str):
        listed: Any = [item.strip() for item in value.split(",") if item.strip()] or [""]
    else:
        listed = value if _is_list(value) else [value]
    try:
        return tuple(map(_file, listed)) or None
    except ValueError:
        raise ValueError("must be one or more file paths, separated by commas or in a list") from None


def _ids(value: Any) -> str | list[Any]:
    """Ids in the form that ``ResidentIds.parse`` accepts."""
    if isinstance(value, os.PathLike):
        return f"@{os.fsdecode(value)}"
    if isinstance(value, str):
        return value
    if not _is_list(value):
        raise ValueError("must be ids such as 0-63,70, a list of ids, one list of ids per MoE layer, or @FILE")
    items = [plain(item) for item in (sorted(value) if isinstance(value, Set) else value)]
    if any(map(_is_list, items)):
        return [[plain(i) for i in item] if _is_list(item) else item for item in items]
    return ",".join(map(str, items))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence | Set) and not isinstance(value, str | bytes)


FILE, FILES, IDS = (or_off(Kind(read), None) for read in (_file, _files, _ids))
FILE_OR_FALSE = or_off(FILE, False)

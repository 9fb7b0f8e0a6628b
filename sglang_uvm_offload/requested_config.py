"""Parsing the flags of a launch: every value that is not well-formed is named at once."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_uvm_offload.config import AUTO, NEVER, RequestedConfig
from sglang_uvm_offload.flag_types import FILES, as_on_the_command_line
from sglang_uvm_offload.flags import OFF, PREFETCHES, SELECTIONS, FlagError, OffloadFlags, flag_name, turned_off
from sglang_uvm_offload.resident_ids import ResidentIds

MAX_WARMUP_TOKENS = 10**12

_FILE = "must be the path of a file"
_FILES = "must be the path of a file, or several, separated by commas or in a list"
_IDS = "must be ids such as 0-63,70, a list of ids, a list of them for each MoE layer, or @FILE"


def parse(values: Mapping[str, Any]) -> RequestedConfig | None:
    """What ``values`` ask for (by field of ``OffloadFlags``), None if offloading is off: without ``num_resident``, where others
    would have no effect, and with -1, whatever else is given.

    Raises ``FlagError`` with every malformed value. Values may be in Python's own types (``flag_types``). Reads the file that
    ``resident_ids`` names.
    """
    flags = OffloadFlags(**as_on_the_command_line(values))
    if turned_off(flags.num_resident):
        return None
    if flags.num_resident is not None:
        flags = dataclasses.replace(flags, num_resident=str(flags.num_resident))
    problems = _choice_problems(flags)
    flags, not_texts = _texts(flags)
    problems += not_texts.values()
    if flags.num_resident is None:
        problems += _without_effect(flags)
        if problems:
            raise FlagError(problems)
        return None
    problems += _number_problems(flags) + _adapt_problems(flags) + _file_problems(flags)
    ids, reasons = (None, []) if "resident_ids" in not_texts else _resident_ids(flags)
    if problems := problems + reasons:
        raise FlagError(problems)
    return RequestedConfig(
        num_resident=None if flags.num_resident == AUTO else int(flags.num_resident),
        resident_selection=flags.resident_selection,  # type: ignore[arg-type]  # one of the choices
        resident_ids=ids,
        warmup_tokens=flags.warmup_tokens,
        adapt="continuous" if _follows_traffic(flags) else flags.adapt,  # type: ignore[arg-type]
        prefetch=flags.prefetch,  # type: ignore[arg-type]
        profiles=tuple(map(Path, _listed(flags.profile))),
        save_profile=None if flags.save_profile is None else Path(flags.save_profile),
        trace=None if flags.trace is None else Path(flags.trace),
        stats=None if flags.stats is None else Path(flags.stats),
        headroom_gb=flags.headroom_gb,
        stream_gb=_stream_gb(flags.stream_buffer_gb),
        stream_tokens=_stream_tokens(flags.stream_tokens),
        tables_in_host=flags.lookup_tables == "host",
        tma=flags.tma == "on",
        backend=flags.backend,
        slots=_slots(flags.slots),
        draft_num_resident=flags.draft_num_resident,
    )


def _choice_problems(flags: OffloadFlags) -> list[str]:
    out = []
    for f in dataclasses.fields(flags):
        choices, value = f.metadata["choices"], getattr(flags, f.name)
        if choices and value not in choices:
            quoted = "; in YAML, put quotes around on and off" if str(value).lower() in ("true", "false") else ""
            out.append(f"{flag_name(f.name)} {value!r}: must be one of {', '.join(choices)}{quoted}")
    return out


def _without_effect(flags: OffloadFlags) -> list[str]:
    return [
        f"{flag_name(f.name)} {getattr(flags, f.name)!r}: has no effect without {flag_name('num_resident')}"
        for f in dataclasses.fields(flags)
        if getattr(flags, f.name) != f.default
    ]


def _number_problems(flags: OffloadFlags) -> list[str]:
    out = []
    n = flags.num_resident
    assert n is not None
    if n == AUTO:
        if flags.resident_selection == "manual":
            out.append(f"{flag_name('num_resident')} auto: {flag_name('resident_selection')} manual needs a number")
    elif not n.isdecimal() or len(n) > 6:
        out.append(f"{flag_name('num_resident')} {n!r}: must be auto, or a whole number of experts, 0 to 999999 ({OFF}: off)")
    drafts = flags.draft_num_resident
    if drafts is not None and (type(drafts) is not int or not 0 <= drafts <= 999999):
        out.append(f"{flag_name('draft_num_resident')} {drafts!r}: must be a whole number of experts, 0 to 999999")
    if type(flags.warmup_tokens) is not int or not 1 <= flags.warmup_tokens <= MAX_WARMUP_TOKENS:
        right = f"must be a whole number of tokens, 1 to {MAX_WARMUP_TOKENS}"
        out.append(f"{flag_name('warmup_tokens')} {flags.warmup_tokens!r}: {right}")
    try:
        _slots(flags.slots)
    except ValueError:
        out.append(f"{flag_name('slots')} {flags.slots!r}: must be auto, or a whole number of slots, 0 to 999999")
    try:
        _stream_gb(flags.stream_buffer_gb)
    except ValueError:
        out.append(f"{flag_name('stream_buffer_gb')} {flags.stream_buffer_gb!r}: must be auto, or GiB from 0 to 1024")
    try:
        _stream_tokens(flags.stream_tokens)
    except ValueError:
        out.append(
            f"{flag_name('stream_tokens')} {flags.stream_tokens!r}: must be auto, inf, or a whole number, 0 to 999999999"
        )
    if type(flags.headroom_gb) not in (int, float) or not 0 <= flags.headroom_gb <= 1024:
        out.append(f"{flag_name('headroom_gb')} {flags.headroom_gb!r}: must be a number of GiB from 0 to 1024")
    return out


def _slots(value: object) -> int | None:
    """0 without the flag, None for ``auto``. Raises ``ValueError``."""
    text = "0" if value is None else str(value)
    if text == AUTO:
        return None
    if not text.isdecimal() or len(text) > 6:
        raise ValueError(value)
    return int(text)


def _stream_gb(value: object) -> float | None:
    """None for ``auto``. Raises ``ValueError``."""
    if value == AUTO:
        return None
    gib = float(str(value))
    if not 0 <= gib <= 1024:
        raise ValueError(value)
    return gib


def _stream_tokens(value: object) -> int | None:
    """None for ``auto``. Raises ``ValueError``."""
    text = str(value)
    if text in (AUTO, "inf"):
        return None if text == AUTO else NEVER
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(value)
    return int(text)


def _follows_traffic(flags: OffloadFlags) -> bool:
    return flags.adapt == "continuous" or flags.prefetch in ("frequency", "speculative")


def _adapt_problems(flags: OffloadFlags) -> list[str]:
    out = []
    if flags.prefetch in PREFETCHES and flags.prefetch != "none" and flags.adapt == "off":
        out.append(
            f"{flag_name('prefetch')} {flags.prefetch}: moves experts while serving, which {flag_name('adapt')} off forbids; "
            "remove one of them"
        )
    if flags.resident_selection == "frequency" and flags.adapt == "off" and flags.profile is None:
        out.append(
            f"{flag_name('adapt')} off: {flag_name('resident_selection')} frequency needs warmup or continuous, or a "
            f"{flag_name('profile')}; for residents that never change, use first_n or manual"
        )
    return out


def _file_problems(flags: OffloadFlags) -> list[str]:
    out = []
    if flags.profile is not None:
        if flags.resident_selection in ("first_n", "manual"):
            out.append(f"{flag_name('profile')} {flags.profile!r}: only {flag_name('resident_selection')} frequency reads it")
        if not _listed(flags.profile) or not all(map(_is_path, _listed(flags.profile))):
            out.append(f"{flag_name('profile')} {flags.profile!r}: {_FILES}")
    for field in ("save_profile", "trace", "stats"):
        value = getattr(flags, field)
        if value is not None and not _is_path(value):
            out.append(f"{flag_name(field)} {value!r}: {_FILE}")
    return out


def _resident_ids(flags: OffloadFlags) -> tuple[ResidentIds | None, list[str]]:
    name, text = flag_name("resident_ids"), flags.resident_ids
    manual = flags.resident_selection == "manual"
    if text is None:
        return None, [f"{flag_name('resident_selection')} manual: needs {name}"] if manual else []
    if not manual and not _follows_traffic(flags):
        readers = f"{flag_name('resident_selection')} manual or {flag_name('adapt')} continuous"
        return None, [f"{name} {text!r}: only {readers} reads it"] if flags.resident_selection in SELECTIONS else []
    try:
        ids = ResidentIds.parse(text)
    except ValueError as error:
        return None, [f"{name} {text!r}: {error}"]
    n = flags.num_resident or ""
    return ids, ids.number_problems(int(n)) if n.isdecimal() and len(n) <= 6 else []


def _texts(flags: OffloadFlags) -> tuple[OffloadFlags, dict[str, str]]:
    """``flags`` without the values that must be text or lists but are neither, and the problem of each."""
    rights = {**dict.fromkeys(FILES, _FILE), "profile": _FILES, "resident_ids": _IDS}
    listed = {"profile": tuple, "resident_ids": list}
    bad = {
        name: value
        for name in rights
        if (value := getattr(flags, name)) is not None and not isinstance(value, (str, listed.get(name, str)))
    }
    problems = {name: f"{flag_name(name)} {value!r}: {rights[name]}" for name, value in bad.items()}
    absent: dict[str, Any] = dict.fromkeys(bad)
    return dataclasses.replace(flags, **absent), problems


def _is_path(text: object) -> bool:
    """Whether ``text`` is a valid file name."""
    try:
        return isinstance(text, str) and bool(text.strip()) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _listed(files: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The files of a list, or of text that separates them by commas."""
    return files if isinstance(files, tuple) else tuple(item.strip() for item in (files or "").split(",") if item.strip())

"""Parses the flags of a launch and reports all malformed values at once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.files import reading
from sglang_uvm_offload.flag_types import plain
from sglang_uvm_offload.flags import (
    CONFIG,
    FLAGS,
    OPTIONS,
    REPLACED,
    FlagError,
    Option,
    config_flag,
    did_you_mean,
    flag_name,
    spelled,
    turned_off,
)
from sglang_uvm_offload.resident_ids import ResidentIds

logger = logging.getLogger(__name__)

MAX_CONFIG_BYTES = 1 << 20
_MALFORMED = object()
_ALL = {**FLAGS, **OPTIONS}


def of_arguments(given: Mapping[str, Any]) -> RequestedConfig | None:
    """``parse`` SGLang's arguments, given by field of ``ARGUMENTS``. Warns about deprecated flags."""
    if turned_off(given.get("num_resident")):
        return None
    options, problems = _options(given.get(CONFIG))
    for name, by in REPLACED.items():
        if (value := given.get(name)) is None:
            continue
        if name == "memory_headroom":  # GiB or a share of VRAM: a wrong guess would show late
            problems.append(f"{spelled(name)} {value!r}: replaced by {by}; use that instead")
        elif name not in OPTIONS:
            logger.warning("%s %r: no longer has an effect; replaced by %s", spelled(name), value, by)
        elif name in options and str(value) != str(options[name]):
            problems.append(f"{spelled(name)} {value!r} and {flag_name(name)} {options[name]!r}: give only the second")
        else:
            logger.warning("%s: replaced by %s", spelled(name), config_flag(**{name: plain(value)}))
            options.setdefault(name, value)
    return parse({**{name: value for name, value in given.items() if name in FLAGS}, **options}, problems)


def _options(given: Any) -> tuple[dict[str, Any], list[str]]:
    """The options in ``--expert-offload-config``, and the problems of the flag as a whole."""
    if given is None or given is False:
        return {}, []
    try:
        found = given if isinstance(given, Mapping) else _json(given)
        if not isinstance(found, Mapping):
            raise ValueError("not a JSON object")
    except (ValueError, RecursionError) as error:
        text = str(given)
        shown = text if len(text) <= 200 else f"{text[:200]}..."
        return {}, [f"""{spelled(CONFIG)} {shown!r}: {error}; give an object such as '{{"warmup_tokens": 8192}}', or @FILE"""]
    names = {**{name: name for name in OPTIONS}, **{name: spelled(name) for name in FLAGS}}
    unknown = [name for name in found if name not in OPTIONS]
    problems = [f"{spelled(CONFIG)} {name!r}: no such option; {did_you_mean(str(name), names)}" for name in unknown]
    return {name: value for name, value in found.items() if name in OPTIONS}, problems


def _json(given: Any) -> Any:
    """Decode JSON text or ``@FILE``. Raises ``ValueError``."""
    text = f"@{os.fsdecode(given)}" if isinstance(given, os.PathLike) else given
    if not isinstance(text, str):
        raise ValueError("not a JSON object")
    if text.startswith("@"):
        try:
            text = reading.read(text[1:], MAX_CONFIG_BYTES).decode()
        except OSError as error:
            raise ValueError(f"cannot read the file: {error.strerror}") from error
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"contains {name!r} twice")
        found[name] = value
    return found


def parse(values: Mapping[str, Any], problems: Iterable[str] = ()) -> RequestedConfig | None:
    """The config that ``values`` (by name of a flag or option) request. None if offloading is off: ``num_resident`` is -1
    (whatever else is given) or not given.

        parse({"num_resident": "auto", "adapt": "continuous"})

    Raises ``FlagError`` with all problems, after ``problems``: malformed values, combinations that do not work, and values that
    have no effect without ``num_resident``. Values may be Python types (``flag_types``). None means the default. Reads the file
    of ``resident_ids``.
    """
    assert values.keys() <= _ALL.keys(), f"unknown flags: {values.keys() - _ALL.keys()}"
    values = {name: plain(value) for name, value in values.items()}
    if turned_off(values.get("num_resident")):
        return None
    read, malformed = _well_formed(values)
    found = [*problems, *malformed]
    off = values.get("num_resident") is None
    if off:
        found += [
            f"{flag_name(name)} {values[name]!r}: no effect without {flag_name('num_resident')}"
            for name, value in read.items()
            if value is not _MALFORMED and value != _read(_ALL[name], None)
        ]
    else:
        read |= _implied(read, values)
        found += [*_selection_problems(read, values), *_adapt_problems(read)]
    if found:
        raise FlagError(found)
    if off:
        return None
    return RequestedConfig(
        profiles=read.pop("profile") or (),
        stream_gb=read.pop("stream_buffer_gb"),
        tables_in_host=read.pop("lookup_tables") == "host",
        tma=read.pop("tma") == "on",
        **read,
    )


def _well_formed(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The parsed values, with ``_MALFORMED`` for malformed ones, and the problems of the latter."""
    read, problems = {}, []
    for name, option in _ALL.items():
        try:
            value = _read(option, values.get(name))
            read[name] = ResidentIds.parse(value) if name == "resident_ids" and value is not None else value
        except ValueError as error:
            read[name] = _MALFORMED
            problems.append(f"{flag_name(name)} {values[name]!r}: {error}")
    return read, problems


def _read(option: Option, value: Any) -> Any:
    given = option.default if value is None else value
    return None if given is None else option.kind.read(given)


def _implied(read: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are implied by a combination of flags."""
    adapt, number, profile, save = (read[name] for name in ("adapt", "num_resident", "profile", "save_profile"))
    if read["prefetch"] in ("frequency", "speculative") and adapt != "off":
        adapt = "continuous"
    if save is None and isinstance(profile, tuple) and len(profile) == 1:
        save = profile[0]
    return {
        "adapt": adapt,
        "resident_selection": read["resident_selection"]
        or ("manual" if read["resident_ids"] is not None and adapt != "continuous" else "frequency"),
        "slots": 0 if read["slots"] is None and number is not None else read["slots"],
        "save_profile": save or None,
    }


def _selection_problems(read: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    names = "resident_selection", "resident_ids", "profile", "num_resident"
    (selection, ids, profile, number), (chosen, by_ids, by_profile, n) = map(read.get, names), map(flag_name, names)
    if selection == "manual":
        if number is None:
            yield f"{n} {AUTO}: {chosen} manual needs a number; {by_ids} without one needs {flag_name('adapt')} continuous"
        if ids is None:
            yield f"{chosen} manual: needs {by_ids}"
    elif selection is not _MALFORMED and ids is not None and read["adapt"] != "continuous":
        yield f"{by_ids} {values['resident_ids']!r}: no effect without {chosen} manual or {flag_name('adapt')} continuous"
    if isinstance(ids, ResidentIds) and isinstance(number, int):
        yield from ids.number_problems(number)
    if selection in ("first_n", "manual") and isinstance(profile, tuple) and read["save_profile"] is None:
        yield f"{by_profile} {values['profile']!r}: no effect without {chosen} frequency, because nothing is saved either"


def _adapt_problems(read: Mapping[str, Any]) -> Iterator[str]:
    if read["adapt"] != "off":
        return
    if read["prefetch"] in ("frequency", "speculative"):
        yield (
            f"{flag_name('prefetch')} {read['prefetch']}: moves experts while serving, which {flag_name('adapt')} off forbids; "
            "remove one of them"
        )
    if read["resident_selection"] == "frequency" and read["profile"] is None:
        yield (
            f"{flag_name('adapt')} off: {flag_name('resident_selection')} frequency needs warmup or continuous, or a "
            f"{flag_name('profile')}; for residents that never change, use first_n or manual"
        )

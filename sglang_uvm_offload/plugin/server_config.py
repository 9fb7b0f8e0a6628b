"""The offload config on SGLang's arguments: parsed when they are resolved, pickled with them to every process."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_uvm_offload.config import OffloadConfig, parse
from sglang_uvm_offload.flags import PREFIX, FlagError, OffloadFlags, flag_name
from sglang_uvm_offload.plugin.compat import resolving_view

_ATTRIBUTE = "_expert_offload"
"""SGLang pickles attributes with a leading underscore along with the fields."""


def parsed_flags(server_args: Any) -> OffloadConfig | None:
    """The config from the flags of ``server_args``, None if offloading is off or these are SGLang's plain arguments. Raises
    ``FlagError`` for values that are not well-formed."""
    cfg = resolving_view(server_args)
    names = {f.name: PREFIX + f.name for f in dataclasses.fields(OffloadFlags)}
    return parse({short: getattr(cfg, name) for short, name in names.items() if hasattr(cfg, name)})


def attach(server_args: Any, config: OffloadConfig | None) -> None:
    setattr(server_args, _ATTRIBUTE, config)


def config_of(server_args: Any) -> OffloadConfig | None:
    """The attached config, None if offloading is off. Raises ``FlagError`` if the flags enable offloading but no config is
    attached: a process must not silently serve without it."""
    if hasattr(server_args, _ATTRIBUTE):
        config: OffloadConfig | None = getattr(server_args, _ATTRIBUTE)
        return config
    if getattr(server_args, PREFIX + "num_resident", None) is not None:
        raise FlagError([f"{flag_name('num_resident')}: SGLang did not resolve these arguments before it used them"])
    return None

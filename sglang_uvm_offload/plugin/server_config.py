"""The offload config attached to SGLang's arguments: checked in the launcher and pickled with them to every process."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import ARGUMENTS, PREFIX, FlagError, flag_name, turned_off
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.requested_config import of_arguments

# SGLang pickles attributes with a leading underscore along with the fields.
_REQUESTED, _CONFIG = "_expert_offload_requested", "_expert_offload_config"


def parsed_flags(server_args: Any) -> RequestedConfig | None:
    """The config that the flags of ``server_args`` request; None if offloading is off or these are SGLang's plain arguments.
    Raises ``FlagError`` for malformed values."""
    cfg = resolving_view(server_args)
    return of_arguments({name: getattr(cfg, PREFIX + name) for name in ARGUMENTS if hasattr(cfg, PREFIX + name)})


def attach_requested(server_args: Any, requested: RequestedConfig | None) -> None:
    setattr(server_args, _REQUESTED, requested)


def attach(server_args: Any, config: RequestedConfig) -> None:
    setattr(server_args, _CONFIG, config)


def requested_of(server_args: Any) -> RequestedConfig | None:
    """The requested config, None if offloading is off. Raises ``FlagError`` if the flags enable offloading but no config is
    attached, because a process must not silently serve without offloading."""
    if hasattr(server_args, _REQUESTED):
        requested: RequestedConfig | None = getattr(server_args, _REQUESTED)
        return requested
    given = getattr(server_args, PREFIX + "num_resident", None)
    if given is not None and not turned_off(given):
        raise FlagError([f"{flag_name('num_resident')} {given}: SGLang used these arguments before resolving them"])
    return None


def config_of(server_args: Any) -> RequestedConfig | None:
    """The checked config, None if offloading is off. Raises ``FlagError`` if the launch was not checked."""
    if requested_of(server_args) is None:
        return None
    config: RequestedConfig | None = getattr(server_args, _CONFIG, None)
    if config is None:
        raise FlagError([f"{flag_name('num_resident')}: SGLang used these arguments before checking the launch"])
    return config

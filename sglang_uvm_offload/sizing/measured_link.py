"""A machine whose link a server has measured, in place of published rates."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone

from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.sizing.machine import Machine


def with_measured_link(machine: Machine, kept: KeptLink | None) -> Machine:
    """``machine`` with the rates that its GPUs have when all read."""
    if kept is None:
        return machine
    source = f"{machine.source}; link: {described(kept)}"
    rates = kept.link.together
    return dataclasses.replace(machine, link_gbps=rates.engine, measured=rates, link=None, source=source)


def described(kept: KeptLink) -> str:
    """The rates, and when they were measured."""
    at = datetime.fromtimestamp(kept.at, timezone.utc)
    return f"{kept.link.described()} (as a server measured it, {at:%Y-%m-%d %H:%M} UTC)"

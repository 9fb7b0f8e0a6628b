"""How fast one rank reads and copies experts, while all do the same: over the link, and within VRAM. Bytes a second."""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang_uvm_offload.plan.inputs import Assumptions, Parallel
from sglang_uvm_offload.plan.machine import Machine

GIGA = 1e9


def read_rate(machine: Machine, parallel: Parallel, assumed: Assumptions) -> float:
    """Bytes a second at which each rank's kernels read host memory in place, all at the same time."""
    if machine.measured:
        return machine.measured.scattered * GIGA
    return over_link(machine, parallel, assumed, assumed.read_efficiency)


def copy_rate(machine: Machine, parallel: Parallel, assumed: Assumptions) -> float:
    """The same of the kernel that copies it to VRAM."""
    if machine.measured:
        return machine.measured.copied * GIGA
    return over_link(machine, parallel, assumed, assumed.copy_efficiency)


def over_link(machine: Machine, parallel: Parallel, assumed: Assumptions, efficiency: float) -> float:
    """Bytes a second at which each rank's kernels cross the link, all at the same time, if one alone reaches ``efficiency`` of
    ``link_gbps``. Each rank has at most its share of what the host's memory gives."""
    link = min(machine.read_gbps or math.inf, machine.link_gbps * efficiency)
    host = machine.host_gbps * assumed.host_efficiency / parallel.ranks
    return min(link, host or math.inf) * GIGA


def vram_copy_rate(machine: Machine, assumed: Assumptions) -> float:
    """Bytes a second that are copied from VRAM to VRAM beside a MoE, at most: each is read and written."""
    both_ways = machine.hbm_gbps * Assumptions.hbm_efficiency / 2
    return min(assumed.vram_copy_gbps, both_ways or math.inf) * GIGA


class StreamRates(NamedTuple):
    """Bytes a second of each rank, while all do the same."""

    read: float
    """In place, over the link."""
    copied: float
    """To a buffer, over the link."""
    in_vram: float
    """To a buffer, from VRAM."""


def stream_rates(machine: Machine, parallel: Parallel, assumed: Assumptions) -> StreamRates | None:
    """None where nothing is known of the link."""
    if not (machine.link_gbps or machine.measured):
        return None
    over_link = read_rate(machine, parallel, assumed), copy_rate(machine, parallel, assumed)
    return StreamRates(*over_link, vram_copy_rate(machine, assumed))

"""Rates at which each rank reads and copies experts while all ranks do, over the link and within VRAM, in bytes per second."""

from __future__ import annotations

import math
from typing import NamedTuple

from sglang_uvm_offload.plan.inputs import Assumptions, Parallel
from sglang_uvm_offload.plan.machine import Machine

GIGA = 1e9


def read_rate(machine: Machine, parallel: Parallel, assumed: Assumptions) -> float:
    """The rate of each rank's zero-copy reads of host memory while all ranks read."""
    if machine.measured:
        return machine.measured.scattered * GIGA
    return over_link(machine, parallel, assumed, assumed.read_efficiency)


def copy_rate(machine: Machine, parallel: Parallel, assumed: Assumptions) -> float:
    """The rate of the kernel that copies from host memory to VRAM while all ranks copy."""
    if machine.measured:
        return machine.measured.copied * GIGA
    return over_link(machine, parallel, assumed, assumed.copy_efficiency)


def over_link(machine: Machine, parallel: Parallel, assumed: Assumptions, efficiency: float) -> float:
    """The rate of each rank's kernels over the link while all ranks use it, if one rank alone reaches ``efficiency`` of
    ``link_gbps``. No rank gets more than its share of the host memory's rate."""
    link = min(machine.read_gbps or math.inf, machine.link_gbps * efficiency)
    host = machine.host_gbps * assumed.host_efficiency / parallel.ranks
    return min(link, host or math.inf) * GIGA


def vram_copy_rate(machine: Machine, assumed: Assumptions) -> float:
    """The highest rate of copies within VRAM while a MoE layer computes. Each byte is read and written."""
    both_ways = machine.hbm_gbps * Assumptions.hbm_efficiency / 2
    return min(assumed.vram_copy_gbps, both_ways or math.inf) * GIGA


class StreamRates(NamedTuple):
    """Rates of each rank while all ranks stream, in bytes per second."""

    read: float
    """Zero-copy reads over the link."""
    copied: float
    """Copies over the link to a buffer."""
    in_vram: float
    """Copies from VRAM to a buffer."""


def stream_rates(machine: Machine, parallel: Parallel, assumed: Assumptions) -> StreamRates | None:
    """None if the link's rate is unknown."""
    if not (machine.link_gbps or machine.measured):
        return None
    over_link = read_rate(machine, parallel, assumed), copy_rate(machine, parallel, assumed)
    return StreamRates(*over_link, vram_copy_rate(machine, assumed))

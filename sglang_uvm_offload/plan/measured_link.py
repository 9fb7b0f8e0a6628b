"""A machine with the link rates that a server has measured, in place of published ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime, timezone

from sglang_uvm_offload.memory.kept_links import KeptLink
from sglang_uvm_offload.plan.gpus import Gpu, known_gpu
from sglang_uvm_offload.plan.inputs import Assumptions
from sglang_uvm_offload.plan.machine import Machine


def with_measured_link(machine: Machine, kept: KeptLink | None) -> Machine:
    """``machine`` with the measured rates of its GPUs while all of them read."""
    if kept is None:
        return machine
    source = f"{machine.source}; link: {described(kept)}"
    rates = kept.link.together
    return dataclasses.replace(machine, link_gbps=rates.engine, measured=rates, link=None, source=source)


def expected_rates(gpus: Sequence[tuple[str, int]]) -> list[float]:
    """The rate that the copy engine of each GPU, given as ``(name, bytes)``, should reach over the link: GB/s, 0 if unknown."""
    return [_expected(known_gpu(name, nbytes)) for name, nbytes in gpus]


def _expected(gpu: Gpu | None) -> float:
    """A link that is wider than the memory behind it runs at the memory's rate."""
    if gpu is None:
        return 0.0
    return min(gpu.link_gbps, gpu.host_gbps * Assumptions.host_efficiency or gpu.link_gbps)


def described(kept: KeptLink) -> str:
    """The rates, and when they were measured."""
    at = datetime.fromtimestamp(kept.at, timezone.utc)
    return f"{kept.link.described()} (as a server measured it, {at:%Y-%m-%d %H:%M} UTC)"

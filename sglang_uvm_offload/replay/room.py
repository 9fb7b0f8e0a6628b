"""The host RAM that a replay needs, checked beforehand: a trace of a megabyte may expand to steps of a terabyte."""

from __future__ import annotations

from collections.abc import Collection

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.routing.trace import Trace
from sglang_uvm_offload.units import size

_REQUEST_BYTES = 256
"""Bytes per request while steps are laid out."""
_EXPERT_BYTES = 4096
"""Bytes of policy state per expert and layer, mostly for forecasts."""


class NoRoom(ValueError):
    """The replay does not fit in host RAM. The message gives needed and available memory."""


def check(trace: Trace, batch: int, policies: Collection[str] = ()) -> None:
    """Raise ``NoRoom`` if replaying ``trace`` with ``batch`` concurrent requests may take more host RAM than is available."""
    need, available = needed(trace, batch, policies), host_available()
    if need <= available:
        return
    steps = f"up to {_steps(trace, batch)} steps of {trace.num_layers} layers with {trace.num_experts} experts"
    remedy = "replay fewer requests" + (", or without --policy belady" if "belady" in policies else "")
    raise NoRoom(f"{steps} take up to {size(need)} of host RAM, and {size(available)} are available; {remedy}")


def needed(trace: Trace, batch: int, policies: Collection[str] = ()) -> int:
    """An upper bound on the bytes needed besides the trace itself."""
    cells = trace.num_layers * (trace.num_experts + 1)
    # Per step and expert: a flag, its copy without layers that route nothing, and for belady the next use (int32).
    of_step = 8 * batch + 64 * trace.num_layers + (6 if "belady" in policies else 2) * cells
    indices = 16 * trace.ids.size  # of the ids, while the flags are set
    return _steps(trace, batch) * of_step + indices + _EXPERT_BYTES * cells + _REQUEST_BYTES * trace.num_requests


def _steps(trace: Trace, batch: int) -> int:
    """An upper bound: each of the two parts (warm-up, scored) may end with one request running alone."""
    longest = int(trace.seq_len.max(initial=0)) if batch > 1 else 0
    return -(-len(trace.ids) // batch) + 2 * longest

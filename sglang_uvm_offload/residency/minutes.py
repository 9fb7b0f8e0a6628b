"""Summarises each minute of serving in one log line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.units import size

MINUTE_SECONDS = 60.0


@dataclass(frozen=True)
class _Totals:
    """A ledger's totals over all layers, as in the status and the metrics."""

    steps: int
    routed: int
    resident: float
    read_bytes: int
    """Bytes that steps transferred over the link: read in place, streamed, and copied into slots."""
    moves: int
    moved_bytes: int

    def since(self, earlier: _Totals) -> _Totals:
        return _Totals(*(new - old for new, old in zip(astuple(self), astuple(earlier), strict=True)))


class Minutes:
    """Computes the growth of a ledger's totals over each minute from now on."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], host_free: Callable[[], int] = host_available):
        """``host_free`` returns the free host RAM in bytes."""
        self._ledger, self._clock, self._host_free = ledger, clock, host_free
        self._began_at, self._at_begin = clock(), self._now()

    def ended(self) -> str | None:
        """The summary of the minute that has just ended. None while it lasts, or if no token was routed in it. Never waits:
        steps whose counts arrive later belong to the next minute."""
        at = self._clock()
        seconds = at - self._began_at
        if seconds < MINUTE_SECONDS:
            return None
        now = self._now()
        new = now.since(self._at_begin)
        self._began_at, self._at_begin = at, now
        if not new.routed:
            return None
        return (
            f"in the last {seconds:.0f} s, {new.steps} steps: hit rate {100 * new.resident / new.routed:.1f} %, "
            f"{new.read_bytes / new.steps / 2**20:.1f} MiB a step over the link, {new.moves} promotions, "
            f"{size(new.moved_bytes)} promoted and demoted; {size(self._host_free())} of host RAM free"
        )

    def _now(self) -> _Totals:
        ledger = self._ledger
        read_bytes = sum(int(each.sum()) for each in (ledger.zero_copy_bytes, ledger.streamed_bytes, ledger.filled_bytes))
        return _Totals(ledger.steps, *ledger.totals_routed, read_bytes, ledger.moves, ledger.moved_bytes)

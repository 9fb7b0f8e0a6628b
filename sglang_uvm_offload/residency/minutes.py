"""What each minute of serving brought, for one line in the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.units import size

MINUTE_SECONDS = 60.0


@dataclass(frozen=True)
class _Totals:
    """Of a ledger, over all layers, as the status and the metrics have them."""

    steps: int
    routed: int
    resident: float
    read_bytes: int
    """Over the link by steps: in place, streamed and into slots."""
    moves: int
    moved_bytes: int

    def since(self, earlier: _Totals) -> _Totals:
        return _Totals(*(new - old for new, old in zip(astuple(self), astuple(earlier), strict=True)))


class Minutes:
    """Differences of a ledger's totals over each minute from now on."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], host_free: Callable[[], int] = host_available):
        """``host_free``: bytes of host RAM that are free now."""
        self._ledger, self._clock, self._host_free = ledger, clock, host_free
        self._began_at, self._at_begin = clock(), self._now()

    def ended(self) -> str | None:
        """What the minute brought that has ended; None while it lasts, and where no token was routed in it. Waits for nothing:
        steps whose counts arrive later belong to the next one."""
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

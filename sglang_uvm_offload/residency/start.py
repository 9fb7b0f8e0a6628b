"""What a rank's start spends its time on, from the launcher's checks until the rank serves."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from sglang_uvm_offload.residency.bounds import Count, Seconds
from sglang_uvm_offload.units import size


class Phase(enum.Enum):
    """In the order in which a start passes through them. Draft models pass through those of loading again."""

    LAUNCH = "launch"
    """Checking the launch, starting this process, importing, meeting the other ranks."""
    BUILD = "build"
    """SGLang builds the model's modules."""
    PLACE = "place experts"
    """Experts are allocated and get their pages. The bytes are theirs, slots not included. Pages that come while SGLang builds
    or reads take no time of this phase."""
    READ = "read"
    """SGLang reads the checkpoint, or fills the model for ``--load-format dummy``, and post-processes what is no expert. The
    bytes are those of the rank's parameters: with several ranks, each reads a part."""
    CONVERT = "convert experts"
    """SGLang repacks, quantises or shuffles expert tensors once they are loaded, and what results is placed."""
    LINK = "measure the link"
    BUFFERS = "slots and buffers"
    POOLS = "KV cache"
    GRAPHS = "graphs"
    """Warm-up and capture of CUDA graphs. Those that only a draft worker makes are in the rest."""
    REST = "rest"
    """All else: attention backends, the scheduler, the first check for evictions."""


class StartPhase(Struct, frozen=True):
    """One phase of a rank's start; what a phase within it takes counts there alone."""

    name: str
    seconds: Seconds
    nbytes: Count = 0
    """0 where a phase is not about bytes."""

    def __str__(self) -> str:
        took = f"{self.name} {self.seconds:.1f} s"
        if not self.nbytes:
            return took
        alone = self.seconds and self.name == Phase.READ.value  # experts get most of their pages beside other phases
        rate = f" at {size(self.nbytes / self.seconds)}/s" if alone else ""
        return f"{took} ({size(self.nbytes)}{rate})"


def described(phases: Sequence[StartPhase]) -> str:
    """One line: how long a start took, and each of its phases."""
    return f"{sum(phase.seconds for phase in phases):.1f} s: {', '.join(map(str, phases))}"


class StartClock:
    """Divides the time of a start among its phases. Once the rank serves, it counts nothing any more."""

    def __init__(self, began_at: float, clock: Callable[[], float] = time.time):
        """``began_at``: when the launch began, by ``clock``, which the launcher's process must share."""
        self._clock = clock
        self._seconds = dict.fromkeys(Phase, 0.0)
        self._nbytes = dict.fromkeys(Phase, 0)
        self._phase: Phase | None = Phase.LAUNCH
        self._since = began_at

    @contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """The block is ``phase``, the rest of the phase around it is after the block too."""
        around = self._phase
        if around is None:
            yield
            return
        self._begin(phase)
        try:
            yield
        finally:
            # What follows the launch is not the launch again: models load, then pools are made, and so on.
            self._begin(Phase.REST if around is Phase.LAUNCH else around)

    def add(self, phase: Phase, nbytes: int) -> None:
        """``phase`` dealt with these bytes too."""
        if self._phase is not None:
            self._nbytes[phase] += nbytes

    def end(self) -> None:
        """The rank serves from here on."""
        self._begin(None)

    def phases(self) -> list[StartPhase]:
        """Those that took any time. The one under way is not counted until it ends."""
        return [StartPhase(p.value, self._seconds[p], self._nbytes[p]) for p in Phase if self._seconds[p] or self._nbytes[p]]

    def _begin(self, phase: Phase | None) -> None:
        now = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] += max(0.0, now - self._since)  # the clock of a machine may be set back
        self._phase, self._since = phase, now

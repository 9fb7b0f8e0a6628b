"""Times a rank's start, from the launcher's checks until the rank serves."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_uvm_offload.residency.status import PhaseTime


class StartPhase(enum.Enum):
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


class StartClock:
    """Divides the time of a start among its phases. Once the rank serves, it counts nothing any more."""

    def __init__(self, began_at: float, clock: Callable[[], float] = time.time):
        """``began_at``: when the launch began, by ``clock``, which the launcher's process must share."""
        self._clock = clock
        self._seconds = dict.fromkeys(StartPhase, 0.0)
        self._nbytes = dict.fromkeys(StartPhase, 0)
        self._phase: StartPhase | None = StartPhase.LAUNCH
        self._since = began_at

    @contextmanager
    def timing(self, phase: StartPhase) -> Iterator[None]:
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
            self._begin(StartPhase.REST if around is StartPhase.LAUNCH else around)

    def add(self, phase: StartPhase, nbytes: int) -> None:
        """``phase`` dealt with these bytes too."""
        if self._phase is not None:
            self._nbytes[phase] += nbytes

    def end(self) -> None:
        """The rank serves from here on."""
        self._begin(None)

    def phases(self) -> list[PhaseTime]:
        """Those that took any time. The one under way is not counted until it ends."""
        return [
            PhaseTime(p.value, self._seconds[p], self._nbytes[p]) for p in StartPhase if self._seconds[p] or self._nbytes[p]
        ]

    def _begin(self, phase: StartPhase | None) -> None:
        now = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] += max(0.0, now - self._since)  # the clock of a machine may be set back
        self._phase, self._since = phase, now

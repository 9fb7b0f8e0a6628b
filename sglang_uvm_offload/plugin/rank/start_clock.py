"""Times a rank's startup, from the launcher's checks until the rank serves."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sglang_uvm_offload.residency.status import PhaseTime


class StartPhase(enum.Enum):
    """The phases of a startup, in order. Draft models repeat the loading phases."""

    LAUNCH = "launch"
    """Checking the launch, starting this process, importing, and connecting to the other ranks."""
    BUILD = "build"
    """SGLang builds the model's modules."""
    PLACE = "place experts"
    """Allocating and populating experts. Counts their bytes without slots. Populating that overlaps building or reading takes
    no time of this phase."""
    READ = "read"
    """SGLang reads the checkpoint, or fills the model for ``--load-format dummy``, and post-processes everything but experts.
    Counts the bytes of the rank's parameters; with several ranks, each reads a part."""
    CONVERT = "convert experts"
    """SGLang repacks, quantises or shuffles loaded expert tensors, and the results are placed."""
    LINK = "measure the link"
    BUFFERS = "slots and buffers"
    POOLS = "KV cache"
    GRAPHS = "graphs"
    """Warm-up and capture of CUDA graphs. Graphs that only a draft worker captures count as the rest."""
    REST = "rest"
    """Everything else: attention backends, the scheduler, the first eviction check."""


class StartClock:
    """Splits the startup time into phases. It stops once the rank serves."""

    def __init__(self, began_at: float, clock: Callable[[], float] = time.time):
        """``began_at``: when the launch began, according to ``clock``, which the launcher's process must share."""
        self._clock = clock
        self._seconds = dict.fromkeys(StartPhase, 0.0)
        self._nbytes = dict.fromkeys(StartPhase, 0)
        self._phase: StartPhase | None = StartPhase.LAUNCH
        self._since = began_at

    @contextmanager
    def timing(self, phase: StartPhase) -> Iterator[None]:
        """Count the block as ``phase``. The enclosing phase resumes after it."""
        around = self._phase
        if around is None:
            yield
            return
        self._begin(phase)
        try:
            yield
        finally:
            # The launch phase does not resume: models load next, then pools are allocated, and so on.
            self._begin(StartPhase.REST if around is StartPhase.LAUNCH else around)

    def add(self, phase: StartPhase, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes of ``phase``."""
        if self._phase is not None:
            self._nbytes[phase] += nbytes

    def end(self) -> None:
        """Stop the clock: the rank serves from here on."""
        self._begin(None)

    def phases(self) -> list[PhaseTime]:
        """The phases that took any time. The current one counts once it ends."""
        return [
            PhaseTime(p.value, self._seconds[p], self._nbytes[p]) for p in StartPhase if self._seconds[p] or self._nbytes[p]
        ]

    def _begin(self, phase: StartPhase | None) -> None:
        now = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] += max(0.0, now - self._since)  # the system clock may be set back
        self._phase, self._since = phase, now

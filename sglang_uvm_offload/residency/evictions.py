"""Detects evictions: when VRAM runs short, the driver silently evicts resident experts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.protocol import ManagedRange, Memory
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

FIRST_BLOCKS, MAX_BLOCKS = 64, 4096
"""How many blocks a check reads at first, and at most. It doubles the number until some are missing, and starts small because
reading a missing block brings it back and may evict another one."""
ENOUGH_MISSING = 8
ROOM_BYTES = 1 << 30
"""With more free VRAM than this, the driver has no reason to evict (on an H100 it began at 44 MiB free), and blocks that it
evicted earlier return for good when a step reads them."""
CHANCE_BLOCKS, CHANCE_SHARE = 2, 0.005
"""Up to this many blocks, or this share of a check's blocks, may read slowly by chance."""


class Evictions:
    """Checks a random sample of the residents' blocks for whether they are in VRAM."""

    def __init__(self, memory: Memory, headroom_gb: float):
        self._memory = memory
        self._headroom_gb = headroom_gb
        self._random = np.random.default_rng()
        self._worst = 0.0
        """The largest evicted share logged so far."""
        self._failed = False
        self.evicted_bytes: int | None = None
        """Bytes of residents outside VRAM, extrapolated from the sample of the last conclusive check. None before the first."""

    def check(self, layers: Sequence[ExpertLayer]) -> None:
        """Check once, which takes some reads by the GPU, and wait for them. Never raises, because serving does not depend on
        it. The first failure disables further checks."""
        if self._failed:
            return
        try:
            share = self._share(layers)
        except (Exception, SystemExit) as error:
            # Logged with its traceback. A GPU error recurs in the next step and ends the process there.
            self._failed, self.evicted_bytes = True, None
            logger.warning("Expert offload: eviction checks disabled after an error", exc_info=error)
            return
        if share is None:
            return
        resident = sum(layer.resident_bytes for layer in layers)
        self.evicted_bytes = round(share * resident)
        if share > 2 * self._worst:
            self._worst = share
            logger.warning(
                "Expert offload: about %s of the %s of resident experts were evicted from VRAM, because something else needed "
                "it. Steps that use them wait for them to be read back; outputs are not affected, and hit rates still count "
                "them as resident. To prevent this, leave more VRAM free: use a larger %s (now %g), fewer resident experts, or "
                "fewer other users of this GPU.",
                size(share * resident),
                size(resident),
                flag_name("headroom_gb"),
                self._headroom_gb,
            )

    def _share(self, layers: Sequence[ExpertLayer]) -> float | None:
        """The share of the residents' blocks that are not in VRAM; None if the check is inconclusive."""
        # The first check always runs, so that its allocations happen before the first step.
        if self.evicted_bytes is not None and self._memory.info().device_free > ROOM_BYTES:
            return 0.0
        sample = self._sample([tensor for layer in layers for tensor in layer.tensors])
        read = missing = 0
        while read < len(sample) and missing < ENOUGH_MISSING:
            some = sample[read : max(FIRST_BLOCKS, 2 * read)]
            found = self._memory.in_vram(some)
            if found is None:
                return None
            read += len(some)
            missing += int((~found).sum())
        return missing / read if missing > max(CHANCE_BLOCKS, CHANCE_SHARE * read) else 0.0

    def _sample(self, tensors: Sequence[ExpertTensor]) -> list[tuple[ManagedRange, int]]:
        """At most ``MAX_BLOCKS`` random blocks of residents."""
        offsets = [tensor.layout.blocks(tensor.resident) for tensor in tensors]
        ends = np.cumsum([0, *map(len, offsets)])
        chosen = self._random.choice(ends[-1], min(MAX_BLOCKS, ends[-1]), replace=False)
        of_tensor = np.searchsorted(ends, chosen, side="right") - 1
        return [(tensors[t].managed, int(offsets[t][i - ends[t]])) for t, i in zip(of_tensor, chosen, strict=True)]

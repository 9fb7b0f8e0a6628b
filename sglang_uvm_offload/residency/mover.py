"""Moving experts between VRAM and host RAM. A fault ends moving; serving goes on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm

from sglang_uvm_offload.experts.layer import ExpertLayer, check_host_ram
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Memory

logger = logging.getLogger(__name__)


class Mover:
    """Moves the layers of one rank to new residents."""

    def __init__(self, memory: Memory, progress: Callable[[], bool]):
        """``progress``: whether this rank shows a progress bar."""
        self.memory = memory
        self.progress = progress
        self.fault: str | None = None
        """Why moving stopped, None while it works."""

    def move(self, layers: Sequence[ExpertLayer], after: np.ndarray, wait: bool) -> int:
        """Make ``after`` (``bool[layers, width]``) resident. Demotes before promoting, so residency never exceeds what it was:
        layer by layer where each layer's promotions fit in its own demotions, else all demotions first. Without ``wait`` the
        moves are queued in that order, and ``check_queued`` reports a late fault. Experts that host RAM has no room for are
        not demoted. Returns the bytes requested to move."""
        moved = 0
        pairs = [(la, wanted[: la.num_experts]) for la, wanted in zip(layers, after, strict=True)]
        pairs = [(la, wanted) for la, wanted in pairs if (la.resident != wanted).any()]
        balanced = all(la.resident.sum() >= wanted.sum() for la, wanted in pairs)
        rounds = [pairs] if balanced else [[(la, la.resident & wanted) for la, wanted in pairs], pairs]
        order = list(itertools.chain.from_iterable(rounds))
        bar = layer_bar("Moving experts", len(order), wait and self.progress())
        # If each move is waited for, host RAM is checked before each: other ranks take from it at the same time.
        for group in [[pair] for pair in order] if wait or not order else [order]:
            try:
                needed = sum(layer.host_bytes_to_demote(wanted) for layer, wanted in dict(group).items())
                check_host_ram(self.memory, "demote", _named([layer for layer, _ in group]), needed)
                for layer, wanted in group:
                    moved += layer.demote(wanted)
                    if wait:
                        self.memory.synchronize()
                    moved += layer.promote(wanted)
                    if wait:
                        self.memory.synchronize()
                    bar.update()
            except ManagedMemoryError as fault:
                self._stop(fault, [layer for layer, _ in group])
                break
        bar.close()
        return moved

    def check_queued(self, layers: Sequence[ExpertLayer]) -> bool:
        """Wait for the queued moves. False if one of them failed, which ends moving."""
        try:
            self.memory.synchronize()
        except ManagedMemoryError as fault:
            self._stop(fault, layers)
            return False
        return True

    def _stop(self, fault: ManagedMemoryError, layers: Sequence[ExpertLayer]) -> None:
        """Keep serving with the experts where they are; ``layers`` may have moved in part."""
        for layer in layers:
            layer.reread_residency()
        self.fault = str(fault)
        logger.error(
            "Expert offload: moving experts stopped: %s. Serving goes on with the experts where they are; outputs are not "
            "affected, decoding may be slower.",
            fault,
        )


def layer_bar(what: str, total: int | None, show: bool) -> tqdm:
    """A progress bar over layers."""
    return tqdm(desc=what, total=total, unit="layer", disable=not show, leave=False)


def _named(layers: Sequence[ExpertLayer]) -> str:
    return f"the experts of MoE layer {layers[0].layer_id}" + (f" and {len(layers) - 1} others" if len(layers) > 1 else "")

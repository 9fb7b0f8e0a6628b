"""Moving extents between VRAM and host RAM. A fault ends moving; serving goes on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm

from sglang_uvm_offload.experts.layer import ExpertLayer, check_host_ram
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Memory, Span
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

LayerExtents = tuple[ExpertLayer, np.ndarray]
"""A layer, and ``bool[extents]`` of it."""


class Mover:
    """Moves the layers of one rank to new residents. One thread at a time may use it."""

    def __init__(self, memory: Memory, progress: Callable[[], bool]):
        """``progress``: whether this rank shows a progress bar."""
        self.memory = memory
        self.progress = progress
        self.fault: str | None = None
        """Why moving stopped, None while it works."""

    def move(self, wanted: Sequence[LayerExtents], show: bool, *, check_vram: bool = True) -> int:
        """Make ``wanted`` resident in each layer, and return when it is. Demotes before promoting, so that never more is
        resident than before: layer by layer where each layer's promotions fit in its own demotions, else all demotions first.
        Demotions that host RAM has no room for, and promotions that VRAM has none for, end moving. Returns the bytes moved.
        ``show``: whether a progress bar may be shown. ``check_vram``: whether promotions need VRAM that shows as free."""
        if self.fault is not None:
            return 0
        moved = 0
        pairs = [(layer, after) for layer, after in wanted if (layer.resident_extents() != after).any()]
        balanced = all(_growth(layer, after) <= 0 for layer, after in pairs)
        rounds = [pairs] if balanced else [[(la, la.resident_extents() & after) for la, after in pairs], pairs]
        order = list(itertools.chain.from_iterable(rounds))
        bar = layer_bar("Moving experts", len(order), show and self.progress())
        try:
            if check_vram:
                self._check_vram(pairs)
            for layer, after in order:
                # Other ranks take host RAM at the same time, so each layer is checked by itself.
                check_host_ram(self.memory, "demote", _named(layer), layer.host_bytes_to_demote(after))
                moved += layer.demote(after) + layer.promote(after)
                bar.update()
        except ManagedMemoryError as fault:
            self._stop(fault, [layer for layer, _ in pairs])
        bar.close()
        return moved

    def _check_vram(self, pairs: Sequence[LayerExtents]) -> None:
        """Raise ``ManagedMemoryError`` if what is promoted, beyond what is demoted, does not fit in free VRAM: the driver would
        evict residents for it."""
        needed = sum(_growth(layer, after) for layer, after in pairs)
        if needed > 0 and needed > (free := self.memory.info().device_free):
            reason = f"residents would grow by {size(needed)}, and {size(free)} of VRAM is free"
            raise ManagedMemoryError("promote", "the experts", Span(0, needed), reason)

    def _stop(self, fault: ManagedMemoryError, layers: Sequence[ExpertLayer]) -> None:
        """Keep serving with the experts where they are; ``layers`` may have moved in part."""
        self.fault = str(fault)
        logger.error(
            "Expert offload: moving experts stopped: %s",
            fault.with_outlook(
                "Serving goes on with the experts where they are; outputs are not affected, decoding may be slower."
            ),
        )
        try:
            for layer in layers:
                layer.reread_residency()
        except ManagedMemoryError as error:
            logger.warning("Expert offload: what was on its way counts as offloaded, wherever it is now: %s", error)


def layer_bar(what: str, total: int | None, show: bool) -> tqdm:
    """A progress bar over layers."""
    return tqdm(desc=what, total=total, unit="layer", disable=not show, leave=False)


def _growth(layer: ExpertLayer, after: np.ndarray) -> int:
    """Bytes that ``after`` takes in VRAM beyond what is resident now."""
    nbytes = np.concatenate([np.zeros(0, dtype=np.int64), *(layout.extent_bytes for layout in layer.layouts)])
    return int(nbytes[after].sum() - nbytes[layer.resident_extents()].sum())


def _named(layer: ExpertLayer) -> str:
    return f"the experts of MoE layer {layer.layer_id}"

"""Moves extents between VRAM and host RAM, alongside the steps, on a thread of its own: the driver's calls hold their caller
for much of a move. After a fault nothing moves any more, and serving goes on."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

import numpy as np
from tqdm import tqdm

from sglang_uvm_offload.experts.layer import ExpertLayer, check_host_ram
from sglang_uvm_offload.experts.pool import ExpertPool
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, Memory, Span
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

STUCK_SECONDS = 600.0
"""Background work that takes longer than this counts as hung."""

LayerExtents = tuple[ExpertLayer, np.ndarray]
"""A layer and a selection of its extents, ``bool[extents]``."""


class Mover:
    """Moves the layers of one rank to new residents. One thread at a time may use ``move``, ``sleep`` and ``wake``."""

    def __init__(self, memory: Memory, progress: Callable[[], bool], executor: Executor | None):
        """``progress``: whether this rank shows a progress bar. ``executor`` runs one task at a time. Without one, tasks run on
        the calling thread."""
        self.memory, self.progress = memory, progress
        self.executor = executor or ThisThread()
        self.failure: str | None = None
        """Why a move failed, which ends all moves; None while moves work."""
        self.skipped_moves = 0
        """Moves that host RAM had no room for, and times that experts could not leave VRAM for ``sleep``."""
        self._stopped: str | None = None
        """Why residents stay where they are although moves work."""
        self._moving: Future[None] | None = None
        """The last move, which may be in progress."""
        self._checking: Future[None] | None = None
        self._awake: list[LayerExtents] | None = None
        """What was resident before ``sleep``, None while awake."""

    @property
    def fault(self) -> str | None:
        """Why residents can no longer change on this rank; None while they can. Peers do not know it."""
        return self._stopped or self.failure

    def stop(self, what: str, error: BaseException) -> None:
        """Keep the residents where they are from now on, because ``what`` failed."""
        self._stopped = f"{what} failed: {type(error).__name__}: {error}"
        logger.error(
            "Expert offload: adapting stopped: %s. Serving goes on with the current residents; outputs are not affected.",
            self._stopped,
            exc_info=error,
        )

    # Alongside the steps

    def submit(self, move: Callable[[], object]) -> None:
        """Run ``move`` after everything submitted earlier. It changes where steps read the experts, not their contents."""

        def guarded() -> None:
            try:
                move()
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- logged with its trace and shown as the fault
                # Nobody reads a move's result, so the error would get lost. Steps compute correctly wherever the experts are.
                # A GPU error recurs at the next kernel and ends the process there.
                self.stop("moving experts", error)

        self._moving = self.executor.submit(guarded)

    def submit_check(self, check: Callable[..., None], *args: Any) -> None:
        """Run ``check``, which must not raise, after everything submitted earlier."""
        self._checking = self.executor.submit(check, *args)

    @property
    def moving(self) -> bool:
        """Whether a move is in progress."""
        return self._moving is not None and not self._moving.done()

    @property
    def checking(self) -> bool:
        """Whether an eviction check is in progress."""
        return self._checking is not None and not self._checking.done()

    def wait(self) -> None:
        """Wait for the work in progress. Raises ``TimeoutError`` if it hangs."""
        tasks = [task for task in (self._moving, self._checking) if task is not None]
        if wait(tasks, STUCK_SECONDS).not_done:
            raise TimeoutError(f"expert moves did not finish within {STUCK_SECONDS:g} s; restart the server")

    # On the calling thread

    def move(self, wanted: Sequence[LayerExtents], show: bool, *, check_vram: bool = True) -> int:
        """Make exactly ``wanted`` resident in each layer, wait for it, and return the bytes moved. Demotes before promoting, so
        that VRAM use never grows in between: layer by layer if each layer's promotions fit into its own demotions, otherwise
        with all demotions first. If host RAM has no room for demotions, or VRAM has none for promotions, all moves end.
        ``show``: whether a progress bar may appear. ``check_vram``: whether promotions must fit into VRAM reported as free."""
        if self.failure is not None:
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
                # Other ranks use host RAM at the same time, so check before each layer.
                name = f"the experts of MoE layer {layer.layer_id}"
                self._check_host_ram(name, layer.host_bytes_to_demote(after))
                moved += layer.demote(after) + layer.promote(after)
                bar.update()
        except ManagedMemoryError as failure:
            self._fail(failure, [layer for layer, _ in pairs])
        bar.close()
        return moved

    def _check_host_ram(self, name: str, needed: int) -> None:
        try:
            check_host_ram(self.memory, "demote", name, needed)
        except ManagedMemoryError:
            self.skipped_moves += 1
            raise

    def _check_vram(self, pairs: Sequence[LayerExtents]) -> None:
        """Raise ``ManagedMemoryError`` if promotions exceed demotions by more than the free VRAM, because the driver would
        evict residents for them."""
        needed = sum(_growth(layer, after) for layer, after in pairs)
        if needed > 0 and needed > (free := self.memory.info().device_free):
            reason = f"residents would grow by {size(needed)}, and {size(free)} of VRAM is free"
            raise ManagedMemoryError("promote", "the experts", Span(0, needed), reason)

    def _fail(self, failure: ManagedMemoryError, layers: Sequence[ExpertLayer]) -> None:
        """End all moves and keep serving with the experts where they are. ``layers`` may have moved in part."""
        self.failure = str(failure)
        logger.error(
            "Expert offload: moving experts stopped: %s",
            failure.with_outlook(
                "Serving goes on with the experts where they are; outputs are not affected, decoding may be slower."
            ),
        )
        try:
            for layer in layers:
                layer.reread_residency()
        except ManagedMemoryError as error:
            logger.warning("Expert offload: experts that were being moved count as offloaded, wherever they are now: %s", error)

    # A server that releases its VRAM

    @property
    def asleep(self) -> bool:
        return self._awake is not None

    def sleep(self, layers: Sequence[ExpertLayer]) -> None:
        """Move all experts and slots of ``layers`` out of VRAM, keeping the addresses in captured graphs. Host RAM holds all of
        them until ``wake``; if it has no room, they stay in VRAM. Call while no step and no move is in progress. SGLang's saver
        would not do it: torch_memory_saver maps other physical memory behind plain allocations, and sees no managed ones."""
        if self._awake is not None:
            return
        self._awake = [(layer, layer.resident_extents()) for layer in layers]
        nothing = [(layer, np.zeros_like(resident)) for layer, resident in self._awake]
        pools = _pools(layers)
        needed = sum(layer.host_bytes_to_demote(none) for layer, none in nothing) + sum(pool.slot_bytes for pool in pools)
        try:
            self._check_host_ram("the experts", needed)
            moved = self.move(nothing, show=False)
            if self.failure is not None:  # other ranks use host RAM at the same time, so a move may fail midway
                raise ManagedMemoryError("demote", "the experts", Span(0, needed), self.failure)
            for pool in pools:
                pool.move_slots(Location.HOST)
        except ManagedMemoryError as failure:
            logger.error("Expert offload: experts stay in VRAM although the server releases its memory: %s", failure)
            self._bring_back(self._awake)
        else:
            logger.info("Expert offload: moved %s of experts out of VRAM until the server resumes", size(moved))

    def _bring_back(self, before: Sequence[LayerExtents]) -> None:
        """Bring back at once what has left VRAM, because after a failure ``wake`` would not."""
        try:
            for pool in _pools([layer for layer, _ in before]):
                pool.move_slots(Location.DEVICE)
            for layer, extents in before:
                layer.promote(extents)
        except ManagedMemoryError as failure:
            logger.error(
                "Expert offload: some experts left VRAM and could not be moved back: %s. Decoding may be slower.", failure
            )

    def wake(self) -> None:
        """Move back what ``sleep`` moved. If VRAM has no room, experts stay in host RAM, where steps read them."""
        before, self._awake = self._awake, None
        if before is None:
            return
        try:
            for pool in _pools([layer for layer, _ in before]):
                pool.move_slots(Location.DEVICE)
        except ManagedMemoryError as failure:
            logger.error("Expert offload: slots stay in host RAM: %s. Serving goes on; decoding may be slower.", failure)
        # A weight update may have brought tensors with other extents, which were placed when created.
        back = [(layer, extents) for layer, extents in before if extents.shape == layer.resident_extents().shape]
        # The driver may still hold the VRAM that they left, and then does not report it as free.
        moved = self.move(back, show=False, check_vram=False)
        logger.info("Expert offload: moved %s of experts back to VRAM", size(moved))


class ThisThread(Executor):
    """Runs each task at once, on the calling thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 -- like any executor: ``Future.result`` raises it
            done.set_exception(error)
        return done


def _pools(layers: Sequence[ExpertLayer]) -> list[ExpertPool]:
    return list(dict.fromkeys(layer.pool for layer in layers if layer.pool is not None))


def layer_bar(what: str, total: int, show: bool) -> tqdm:
    """A progress bar over layers."""
    return tqdm(desc=what, total=total, unit="layer", disable=not show, leave=False)


def _growth(layer: ExpertLayer, after: np.ndarray) -> int:
    """How many more bytes of VRAM the layer uses with ``after`` than now."""
    nbytes = np.concatenate([np.zeros(0, dtype=np.int64), *(layout.extent_bytes for layout in layer.layouts)])
    return int(nbytes[after].sum() - nbytes[layer.resident_extents()].sum())

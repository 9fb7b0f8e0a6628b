"""Online weight updates, and what was counted with the old weights.

Residents that a warm-up chose are chosen again, after a warm-up with the new weights (``OffloadManager.weights_updated``). A
profile or trace belongs to the checkpoint that the server started with, so an update from another checkpoint on disk ends
saving.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.protocol import ManagedMemoryError
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.residency.manager import OffloadManager

logger = logging.getLogger(__name__)

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = (
    *(f"{_UPDATER}.update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")),
    f"{_UPDATER}.end_weight_update",
)
"""A session may end without an update: its trainer may have written the weights itself."""


class OnlineUpdates:
    def __init__(self, manager: Callable[[], OffloadManager], savers: list[Saver], model_path: Callable[[], str]):
        """``savers`` is emptied if saving ends. ``model_path``: of the checkpoint whose weights are served."""
        self._manager = manager
        self._savers = savers
        self._model_path = model_path

    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        for target in UPDATES:
            add(target, self._around_update, HookType.AROUND)

    def _around_update(self, original: Callable[..., Any], updater: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang calls this between steps, on every rank."""
        path = getattr(request, "model_path", None)
        if path is not None and path != self._model_path():
            self._end_saving(path)
        try:
            result = original(updater, request, *args, **kwargs)
        except (FlagError, ManagedMemoryError) as error:
            enforce.end(f"sglang-uvm-offload: a weight update failed: {error}")
        if get_parallel().enable_dp_attention_local_control_broadcast:
            # Ranks learn of it between different steps: they would choose before different ones, and wait for each other.
            logger.info("Expert offload: residents are not chosen anew: --enable-dp-attention-local-control-broadcast")
            return result
        # Whatever its result: it may be another one on a peer, which then chooses residents together with this rank. And a
        # failed update may have written weights.
        self._manager().weights_updated()
        return result

    def _end_saving(self, path: str) -> None:
        """Save a last time, before the update, what was counted so far. Saving also ends if the update fails, because it is
        then unknown which weights the server has."""
        saved: Sequence[Saver] = list(self._savers)
        self._savers.clear()
        for saver in saved:
            saver.finish()
            logger.warning(
                "Expert offload: stops saving the %s, which is of the checkpoint before the weights of %s", saver.what, path
            )

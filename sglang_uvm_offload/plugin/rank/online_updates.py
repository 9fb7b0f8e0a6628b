"""Online weight updates, which invalidate routing counted with the old weights.

Residents chosen by a warm-up are chosen again after a warm-up with the new weights (``OffloadManager.weights_updated``). A
profile or trace belongs to the checkpoint that the server started with, so loading another checkpoint from disk ends saving.
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
"""The functions after which weights are new. The end of a session counts, because its trainer may write weights directly."""


class OnlineUpdates:
    def __init__(self, manager: Callable[[], OffloadManager], savers: list[Saver], model_path: Callable[[], str]):
        """``savers`` is emptied when saving ends. ``model_path`` returns the checkpoint being served."""
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
            # Ranks see the update between different steps. Choosing then would make them wait for each other.
            logger.info("Expert offload: residents are not re-selected: --enable-dp-attention-local-control-broadcast is set")
            return result
        # Ignore the result: a peer may have another one and chooses residents together with this rank. A failed update may
        # also have written weights.
        self._manager().weights_updated()
        return result

    def _end_saving(self, path: str) -> None:
        """Save the counts one last time before the update. Saving also ends if the update fails, because the served weights are
        then unknown."""
        saved: Sequence[Saver] = list(self._savers)
        self._savers.clear()
        for saver in saved:
            saver.finish()
            logger.warning(
                "Expert offload: no longer saving the %s, which belongs to the checkpoint before %s", saver.what, path
            )

"""The SGLang functions that write experts after loading. Each of them makes every copy of an expert stale.

online updates      from disk, tensors, a process group or IPC; a session unpacks weights at its start and packs them at its
                    end, and a trainer that writes over RDMA does so in between
weight checker      fills weights with noise to check that an update overwrites it
expert placement    EPLB, and restoring a lost rank's experts from backup
sleep               may release weights and come back with different ones
loading             during graph capture, and by code that calls a model's ``load_weights`` itself
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_SCHEDULER_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"

WRITERS = (
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.load_weights_from_distributed",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.begin_weight_update",
    f"{_UPDATER}.end_weight_update",
    "sglang.srt.utils.weight_checker.WeightChecker._reset_tensors",
    "sglang.srt.eplb.expert_location_updater.ExpertLocationUpdater.update",
    "sglang.srt.elastic_ep.expert_backup_client.ExpertBackupClient.update_weights",
    f"{_SCHEDULER_UPDATER}.release_memory_occupation",
    f"{_SCHEDULER_UPDATER}.resume_memory_occupation",
    "sglang.srt.model_executor.model_runner.ModelRunner.finalize_startup_weight_load",
    f"{_FUSED_MOE}.weight_loader",
    f"{_FUSED_MOE}.weight_loader_fused",
)


def watch_writes(on_write: Callable[[], None], add: Callable[[str, Any, HookType], None]) -> None:
    """Call ``on_write`` after each of ``WRITERS``, even after a failure, which may have written some weights. Writers run for
    each tensor of each expert, nested and on several threads, so ``on_write`` should only set a flag."""

    def around_writer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            on_write()

    for target in WRITERS:
        add(target, around_writer, HookType.AROUND)

"""Installs the hooks of an offloading scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_server_args

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.plugin.rank import checkpoint_reading
from sglang_uvm_offload.plugin.rank.expert_adapters import ExpertAdapters
from sglang_uvm_offload.plugin.rank.expert_map import UPDATER, around_update
from sglang_uvm_offload.plugin.rank.loading_hooks import LoadingHooks
from sglang_uvm_offload.plugin.rank.online_updates import OnlineUpdates
from sglang_uvm_offload.plugin.rank.operating_hooks import OperatingHooks
from sglang_uvm_offload.plugin.rank.start_clock import StartPhase
from sglang_uvm_offload.plugin.rank.state import RankState
from sglang_uvm_offload.plugin.rank.step_hooks import StepHooks
from sglang_uvm_offload.plugin.weight_writes import watch_writes

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_BUILD = "sglang.srt.model_loader.loader._initialize_model"
_FUSED_MOE = "sglang.srt.layers.moe.fused_moe_triton.layer.FusedMoE"
_READ = "sglang.srt.model_loader.loader.buffered_multi_thread_safetensors_weights_iterator"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_DRAFT_GRAPHS = (
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
)
"""Graph runners that replay a draft model's steps without calling its ``forward``. The runners of multi-layer drafts, and of
drafts that share the target's KV cache, do so too; of those drafts, only prefill steps are counted."""


def install(
    config: RequestedConfig,
    add: Callable[[str, Any, HookType], None],
    *,
    adapters: bool = True,
    memory_saver: bool = True,
    compiled: bool = False,
) -> None:
    """Install the hooks that feed this process's manager, which is created when the first model loads.

    ``adapters``: whether the server has LoRA adapters. ``memory_saver``: whether it may release its memory. ``compiled``:
    whether ``torch.compile`` traces its steps.
    """
    rank = RankState(config, compiled)
    loading, steps, operating = LoadingHooks(rank), StepHooks(rank), OperatingHooks(rank)
    add(f"{_RUNNER}.load_model", loading.around_load_model, HookType.AROUND)
    add(_BUILD, loading.around_build, HookType.AROUND)
    for loader in ("weight_loader", "weight_loader_fused"):
        add(f"{_FUSED_MOE}.{loader}", loading.before_weight, HookType.BEFORE)
    add(_READ, checkpoint_reading.around_threads, HookType.AROUND)
    add(f"{_RUNNER}.alloc_memory_pool", loading.around_pools, HookType.AROUND)
    add(f"{_RUNNER}.init_cuda_graphs", rank.timed(StartPhase.GRAPHS), HookType.AROUND)
    add(f"{_RUNNER}.forward", steps.around_forward, HookType.AROUND)
    add(f"{_SCHEDULER}.__init__", operating.after_scheduler_init, HookType.AFTER)
    add(f"{_SCHEDULER}.get_init_info", operating.after_init_info, HookType.AFTER)
    add(f"{_SCHEDULER}.get_internal_state", operating.after_internal_state, HookType.AFTER)
    add(f"{_SCHEDULER}.set_internal_state", operating.around_set_internal_state, HookType.AROUND)
    add(f"{_SCHEDULER}.process_batch_result", operating.after_batch, HookType.AFTER)
    add(f"{_SCHEDULER}.on_idle", operating.after_idle, HookType.AFTER)
    add(f"{_SCHEDULER}.handle_shutdown", operating.after_shutdown, HookType.AFTER)
    add(UPDATER, lambda *args, **kwargs: around_update(rank.rearranging, *args, **kwargs), HookType.AROUND)
    rank.layer_hooks.install(add)
    if config.tables_in_host:
        rank.tables.install(add)
    if not config.tma:
        without_tma(add)
    OnlineUpdates(lambda: rank.manager, rank.savers, lambda: model_config_of(get_server_args()).model_path).install(add)
    if memory_saver:
        for moment, hook in (("release", operating.after_release), ("resume", operating.after_resume)):
            add(f"{_UPDATER}.{moment}_memory_occupation", hook, HookType.AFTER)
    if adapters:
        ExpertAdapters(rank.layer_hooks).install(add)
    if config.draft_num_resident is not None:
        for graphs in _DRAFT_GRAPHS:
            add(f"{graphs}.execute", steps.around_draft_graph, HookType.AROUND)
    if config.slots != 0:
        for seam in rank.seams:
            seam.install(add)
        watch_writes(rank.experts_written, add)
    if rank.recording is not None:
        add(f"{_RUNNER}.forward", rank.recording.after_forward, HookType.AFTER)


def without_tma(add: Callable[[str, Any, HookType], None]) -> None:
    """Stop SGLang's Triton MoE kernels from loading weights with TMA. Tile configurations with ``USE_TMA`` then behave as on a
    GPU without TMA: the same tiles with plain loads."""
    add("sglang.kernels.ops.moe.fused_moe_triton_kernels.support_tensor_descriptor", lambda: False, HookType.REPLACE)

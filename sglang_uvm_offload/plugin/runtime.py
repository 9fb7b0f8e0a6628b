"""Hooks in a scheduler process that offloads: loading a model, each forward step, and what the process reports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import (
    get_device,
    get_observability,
    get_parallel,
    get_serving,
    process_model_config,
)

from sglang_uvm_offload.config import FlagError, OffloadConfig
from sglang_uvm_offload.manager import OffloadManager
from sglang_uvm_offload.metrics import Metrics
from sglang_uvm_offload.plugin import demand
from sglang_uvm_offload.plugin.fused_moe import LayerHooks
from sglang_uvm_offload.plugin.profiles import chosen_profile, profile_saver, routed_model
from sglang_uvm_offload.plugin.recording import Recording
from sglang_uvm_offload.profile import RoutedModel
from sglang_uvm_offload.report import residency_table
from sglang_uvm_offload.routing import ALL_ROWS, CpuRoutingCounters, Phase, RoutingCounters
from sglang_uvm_offload.saver import Saver
from sglang_uvm_offload.uvm import Memory, MemoryFault
from sglang_uvm_offload.uvm_host import HostMemory

logger = logging.getLogger(__name__)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_MODEL = "_expert_offload"


def install(config: OffloadConfig, add: Callable[[str, Any, HookType], None]) -> None:
    """Make this process's manager when its first model loads, and hook what the manager lives on."""
    rank = _RankHooks(config)
    add(f"{_RUNNER}.load_model", rank.around_load_model, HookType.AROUND)
    add(f"{_RUNNER}.forward", rank.around_forward, HookType.AROUND)
    add(f"{_SCHEDULER}.__init__", rank.after_scheduler_init, HookType.AFTER)
    add(f"{_SCHEDULER}.get_internal_state", rank.after_internal_state, HookType.AFTER)
    add(f"{_SCHEDULER}.process_batch_result", rank.after_batch, HookType.AFTER)
    add(f"{_SCHEDULER}.on_idle", rank.after_idle, HookType.AFTER)
    add(f"{_SCHEDULER}.handle_shutdown", rank.after_shutdown, HookType.AFTER)
    rank.layer_hooks.install(add)
    if rank.recording is not None:
        add(f"{_RUNNER}.forward", rank.recording.after_forward, HookType.AFTER)


class _RankHooks:
    def __init__(self, config: OffloadConfig):
        self.config = config
        self.recording = Recording(config.trace) if config.trace is not None else None
        self.layer_hooks = LayerHooks(config.resident_selection == "frequency", self.recording)
        self.metrics: Metrics | None = None
        self.savers: list[Saver] = []

    @cached_property
    def on_cuda(self) -> bool:
        return get_device().device == "cuda"

    @cached_property
    def routed(self) -> RoutedModel | None:
        return routed_model(process_model_config())

    @cached_property
    def manager(self) -> OffloadManager:
        """Made when the first model loads: only then is the process bound to its GPU."""
        thinker = _thinker() if self.config.adapt == "continuous" else None
        return OffloadManager(self.config, _memory(self.config), _counters, _agree, progress=_is_first_rank, thinker=thinker)

    def around_load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            manager = self.manager
            if not runner.is_draft_worker:
                manager.moe_layers = self.routed.moe_layers if self.routed is not None else ()
                manager.profile = chosen_profile(self.config, self.routed)
            model = manager.begin_model(draft=runner.is_draft_worker)
            runner.__dict__[_MODEL] = model
            with self.layer_hooks.taking_over(manager, model):
                result = original(runner, *args, **kwargs)
            manager.finish_model(model, may_be_empty=get_parallel().pp_size > 1)
            if self.recording is not None and not model.draft:
                self.savers += filter(None, [self.recording.begin(model, self.layer_hooks.top_k)])
        except (FlagError, MemoryFault) as error:
            demand.end(f"sglang-uvm-offload: {error}")
        return result

    def around_forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A step counts its rows while it is launched; whatever runs outside (capture, warm-up kernels) counts none."""
        if self.on_cuda and torch.cuda.is_current_stream_capturing():  # a draft model's steps are captured by calling this
            return original(runner, batch, *args, **kwargs)
        model = runner.__dict__[_MODEL]
        rows, tokens, phase = _step_of(batch)
        self.manager.begin_step(model, rows, tokens, phase)
        try:
            return original(runner, batch, *args, **kwargs)
        finally:
            self.manager.end_step(model)

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        logger.info(
            "Expert offload, rank %d:\n%s",
            get_parallel().tp_rank,
            residency_table(self.manager.status(), self.manager.memory.info(), scheduler.max_total_num_tokens),
        )
        if self.layer_hooks.uncounted:
            logger.warning("Expert offload: coverage is not counted; routing comes as %s", sorted(self.layer_hooks.uncounted))
        if get_observability().enable_metrics:
            parallel = get_parallel()
            self.metrics = Metrics(
                self.manager,
                {
                    "model_name": get_serving().served_model_name or "",
                    "tp_rank": str(parallel.tp_rank),
                    "pp_rank": str(parallel.pp_rank),
                    "dp_rank": str(parallel.dp_rank or 0),
                },
            )
            self.metrics.publish()
        self.savers += filter(None, [profile_saver(self.manager, self.routed)])

    def after_internal_state(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        result.internal_state["expert_offload"] = self.manager.status()
        if self.recording is not None:
            result.internal_state["expert_offload"]["trace"] = self.recording.status()
        return result

    def after_batch(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.metrics is not None:
            self.metrics.publish_now_and_then()
        self.manager.poll_now_and_then()
        for saver in self.savers:
            saver.now_and_then()

    def after_idle(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.metrics is not None:
            self.metrics.publish_when_idle()
        self.manager.poll_when_idle()
        for saver in self.savers:
            saver.when_idle()

    def after_shutdown(self, result: Any, *args: Any, **kwargs: Any) -> None:
        for saver in self.savers:
            saver.finish()


def _step_of(batch: Any) -> tuple[int, int, Phase]:
    """The rows of a step that are tokens, all its tokens on the ranks that compute it together, and its phase."""
    mode = batch.forward_mode
    own = 0 if mode.is_idle() else len(batch.input_ids)
    phase = Phase.DECODE if mode.is_decode_or_idle() or mode.is_target_verify() else Phase.PREFILL
    everywhere = batch.global_num_tokens_cpu
    if everywhere is not None and batch.is_extend_in_batch:
        phase = Phase.PREFILL  # of another rank, whose tokens this one computes too
    if not get_moe_a2a_backend().is_none():
        # Experts compute what other ranks send, of which this one does not know beforehand.
        return ALL_ROWS, max(1, own, sum(everywhere or ())), phase
    if everywhere is None:
        return own, own, phase
    # Gathered: padding is no longer at the end of the rows.
    tokens = int(sum(everywhere))
    return ALL_ROWS if tokens else 0, tokens, phase


def _memory(config: OffloadConfig) -> Memory:
    backend = config.backend
    if backend == "auto":
        backend = "uvm" if get_device().device == "cuda" else "host"
    if backend == "host":
        return HostMemory()
    from sglang_uvm_offload.uvm_cuda import CudaMemory

    try:
        return CudaMemory(get_device().gpu_id)
    except RuntimeError as error:
        raise FlagError([str(error)]) from error


def _counters(num_layers: int, num_experts: int) -> RoutingCounters:
    if get_device().device == "cuda":
        from sglang_uvm_offload.routing_cuda import CudaRoutingCounters

        return CudaRoutingCounters(num_layers, num_experts)
    return CpuRoutingCounters(num_layers, num_experts)


def _thinker() -> ThreadPoolExecutor:
    """A thread on this rank's GPU: a new one starts on GPU 0, and its first call there would take VRAM for a context."""
    device = get_device()
    begin = (lambda: torch.cuda.set_device(device.gpu_id)) if device.device == "cuda" else None
    return ThreadPoolExecutor(1, "expert offload", initializer=begin)


def _agree(decide: Callable[[], Any]) -> Any:
    """What the first of the ranks that hold shards of the same experts decides."""
    group = get_parallel().moe_tp_group
    return group.broadcast_object(decide() if group.rank_in_group == 0 else None, src=0)


def _is_first_rank() -> bool:
    parallel = get_parallel()
    return parallel.tp_rank == 0 and parallel.pp_rank == 0

"""Hooks in a scheduler process that offloads: model loading, each forward step, and reporting."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import (
    get_device,
    get_observability,
    get_parallel,
    get_schedule,
    get_serving,
)

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Memory
from sglang_uvm_offload.plugin import compat, enforce
from sglang_uvm_offload.plugin.launch.profiles import chosen_profile, named
from sglang_uvm_offload.plugin.launch.routing_formats import counting_flags
from sglang_uvm_offload.plugin.operate.actions import Action, perform, refusal
from sglang_uvm_offload.plugin.rank.built_model import BuiltModel, EarlierStages
from sglang_uvm_offload.plugin.rank.expert_adapters import ExpertAdapters
from sglang_uvm_offload.plugin.rank.expert_map import UPDATER, around_update
from sglang_uvm_offload.plugin.rank.fused_moe import LayerHooks
from sglang_uvm_offload.plugin.rank.indexer_budget import take_indexer_budget
from sglang_uvm_offload.plugin.rank.online_updates import OnlineUpdates
from sglang_uvm_offload.plugin.rank.profile_saver import profile_saver
from sglang_uvm_offload.plugin.rank.recording import Recording
from sglang_uvm_offload.plugin.rank.stream_buffers import make_streamer, room_in_vram, stream_status
from sglang_uvm_offload.plugin.rank.torch_bound import bound_torch
from sglang_uvm_offload.plugin.slots.allocation import make_slots
from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam
from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam
from sglang_uvm_offload.plugin.slots.seam import Seam
from sglang_uvm_offload.plugin.slots.triton import SlotSeam
from sglang_uvm_offload.plugin.weight_writes import watch_writes
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.residency.rearranging import Rearranging
from sglang_uvm_offload.residency.reporting import rank_status
from sglang_uvm_offload.residency.status import RankStatus, SaveStatus
from sglang_uvm_offload.residency.table import residency_table
from sglang_uvm_offload.routing.counts import ALL_ROWS, Phase, RoutingCounters
from sglang_uvm_offload.routing.profile import RoutedModel
from sglang_uvm_offload.sizing.moe_shape import stated_top_k
from sglang_uvm_offload.streaming.slots import ModelSlots
from sglang_uvm_offload.streaming.streamer import Streamer

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.operate.metrics import Metrics

logger = logging.getLogger(__name__)

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_BUILD = "sglang.srt.model_loader.loader._initialize_model"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_MODEL = "_expert_offload_model"
_DRAFT_GRAPHS = (
    "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner",
)
"""These replay a draft model's steps without calling its ``forward``. So do the graph runners of multi-layer drafts and of
drafts that share the target's KV cache; of those drafts, only the prefill steps are counted."""


def install(
    config: OffloadConfig,
    add: Callable[[str, Any, HookType], None],
    *,
    adapters: bool = True,
    memory_saver: bool = True,
    compiled: bool = False,
) -> None:
    """Install the hooks that feed this process's manager, which is created when the first model loads. ``adapters``: whether
    the server has LoRA adapters. ``memory_saver``: whether it may release its memory. ``compiled``: whether ``torch.compile``
    traces its steps."""
    compat.install(add)
    rank = _RankHooks(config, compiled)
    add(f"{_RUNNER}.load_model", rank.around_load_model, HookType.AROUND)
    add(_BUILD, rank.around_build, HookType.AROUND)
    add(f"{_RUNNER}.forward", rank.around_forward, HookType.AROUND)
    add(f"{_SCHEDULER}.__init__", rank.after_scheduler_init, HookType.AFTER)
    add(f"{_SCHEDULER}.get_internal_state", rank.after_internal_state, HookType.AFTER)
    add(f"{_SCHEDULER}.set_internal_state", rank.around_set_internal_state, HookType.AROUND)
    add(f"{_SCHEDULER}.process_batch_result", rank.after_batch, HookType.AFTER)
    add(f"{_SCHEDULER}.on_idle", rank.after_idle, HookType.AFTER)
    add(f"{_SCHEDULER}.handle_shutdown", rank.after_shutdown, HookType.AFTER)
    add(UPDATER, rank.around_update, HookType.AROUND)
    rank.layer_hooks.install(add)
    OnlineUpdates(lambda: rank.manager, rank.savers, lambda: compat.process_model_config().model_path).install(add)
    if memory_saver:
        for moment, hook in (("release", rank.after_release), ("resume", rank.after_resume)):
            add(f"{_UPDATER}.{moment}_memory_occupation", hook, HookType.AFTER)
    if adapters:
        ExpertAdapters(rank.layer_hooks).install(add)
    if config.draft_num_resident is not None:
        for graphs in _DRAFT_GRAPHS:
            add(f"{graphs}.execute", rank.around_draft_graph, HookType.AROUND)
    if config.slots > 0:
        for seam in rank.seams:
            seam.install(add)
        watch_writes(rank.experts_written, add)
    if rank.recording is not None:
        add(f"{_RUNNER}.forward", rank.recording.after_forward, HookType.AFTER)


class _RankHooks:
    def __init__(self, config: OffloadConfig, compiled: bool = False):
        self.config = config
        self.recording = Recording(config.trace) if config.trace is not None else None
        self.layer_hooks = LayerHooks(counting_flags(config), self.recording, compiled)
        self.seams: tuple[Seam, ...] = (SlotSeam(), MarlinSlotSeam(), DeepGemmSlotSeam())
        self.slots: ModelSlots | None = None
        """The target model's slots, once it is loaded; None if no layer has any."""
        self.metrics: Metrics | None = None
        self.savers: list[Saver] = []
        self.routed_model: RoutedModel | None = None
        """The identity of the target model, once it is built."""
        self._on_build: Callable[[], None] | None = None
        """Called once, when the target model is built."""

    @cached_property
    def on_cuda(self) -> bool:
        return get_device().device == "cuda"

    @cached_property
    def manager(self) -> OffloadManager:
        """Created when the first model loads: before that, the process is not bound to its GPU."""
        return OffloadManager(
            self.config,
            _memory(self.config),
            _counters,
            _broadcast_decision,
            progress=_is_first_rank,
            executor=_executor(),
        )

    @cached_property
    def rearranging(self) -> Rearranging:
        return Rearranging(self.manager)

    def _begin_target(self) -> ModelExperts:
        """Call this before the target model is built. Once it is, the flags are checked against it: before its weights are
        read, or after, with a loader that builds and reads in one call."""
        earlier = EarlierStages(self.config)
        placement = InitialPlacement(self.config, chosen_profile(self.config, compat.process_model_config()), earlier.layers)
        model = self.manager.begin_model(False, placement)

        def check_built() -> None:
            earlier.send_to_next([layer.layer_id for layer in model.layers])
            built = BuiltModel(model, self._top_k())
            self.routed_model = built.routed_model(*named(compat.process_model_config()))
            built.check(placement, self.routed_model)
            if self.recording is not None:
                self.recording.check_built(built)

        self._on_build = check_built
        return model

    def _top_k(self) -> int | None:
        """Routed experts per token of the target model: from its layers, else from its config."""
        return self.layer_hooks.top_k or stated_top_k(compat.process_model_config().hf_text_config)

    def around_build(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """SGLang builds the modules of a model and reads no weights. ``--load-format presharded`` first builds another one on
        the meta device, only for the shapes of its tensors."""
        if torch.get_default_device().type == "meta":
            with self.layer_hooks.leaving_alone():
                return original(*args, **kwargs)
        result = original(*args, **kwargs)
        self._built()
        return result

    def _built(self) -> None:
        check_built, self._on_build = self._on_build, None
        if check_built is not None:
            check_built()

    def around_load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            manager = self.manager
            model = manager.begin_model(True) if runner.is_draft_worker else self._begin_target()
            runner.__dict__[_MODEL] = model
            with self.layer_hooks.taking_over(manager, model):
                result = original(runner, *args, **kwargs)
                self._built()
            for layer in model.layers:
                layer.sync_tensors(*layer.holders)  # loaders may replace tensors after post-load processing
            manager.finish_model(model, may_be_empty=get_parallel().pp_size > 1)
            if not model.draft:
                # A server that releases its weights then also releases the buffers, and gets them back at the same size.
                with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS):
                    self.layer_hooks.streamer = self._streamer(model, runner.pre_model_load_memory)
                self._begin_slots(model)
            if self.recording is not None and not model.draft:
                self.savers += filter(None, [self.recording.begin(model, self._top_k())])
        except (FlagError, ManagedMemoryError) as error:
            enforce.end(f"sglang-uvm-offload: {error}")
        return result

    def _streamer(self, model: ModelExperts, free_before_load: float) -> Streamer | None:
        """``free_before_load``: GiB of VRAM."""
        memory = self.manager.memory
        room = room_in_vram(memory, free_before_load, get_schedule().mem_fraction_static)
        return make_streamer(self.config, memory, model.layers, room, compat.gpu_id(), self.manager.ledger.add_streamed)

    def around_forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts a step's rows while it is launched, and nothing outside of steps (capture, warm-up kernels)."""
        if self.on_cuda and torch.cuda.is_current_stream_capturing():  # SGLang calls this to capture a draft model
            return original(runner, batch, *args, **kwargs)
        model = runner.__dict__[_MODEL]
        valid_rows, tokens, phase = _step_of(batch)
        streamer = None if model.draft else self.layer_hooks.streamer
        if streamer is not None and not (_is_eager(runner, batch, phase) and streamer.streams(tokens)):
            streamer = None
        self.manager.begin_step(model, valid_rows, tokens, phase, streams=streamer is not None)
        if self.slots is not None and not model.draft:
            if streamer is not None:
                phase = Phase.PREFILL
            self.slots.begin_step(valid_rows, phase, () if phase is Phase.DECODE else _ends(batch))
        try:
            if streamer is not None:
                streamer.begin_step()
            return original(runner, batch, *args, **kwargs)
        finally:
            if streamer is not None:
                streamer.end_step()
            self.manager.end_step(model)

    def around_draft_graph(self, original: Callable[..., Any], graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A graph of several drafted tokens counts as one step."""
        model = graphs.model_runner.__dict__[_MODEL]
        gathered = batch.global_num_tokens_cpu is not None or not get_moe_a2a_backend().is_none()
        rows = len(batch.positions)
        self.manager.begin_step(model, ALL_ROWS if gathered else rows, rows, Phase.DECODE)
        try:
            return original(graphs, batch, *args, **kwargs)
        finally:
            self.manager.end_step(model)

    def _begin_slots(self, model: ModelExperts) -> None:
        self.slots = self.layer_hooks.slots = make_slots(model)
        if self.slots is not None:
            for seam in self.seams:
                seam.find = self.slots.at
            if self.layer_hooks.streamer is not None:
                self.layer_hooks.streamer.slot_of = self.slots.slot_of

    def experts_written(self) -> None:
        """The bytes of experts may have changed."""
        if self.slots is not None:
            self.slots.bytes_written()

    def around_update(self, *args: Any, **kwargs: Any) -> Any:
        return around_update(self.rearranging, *args, **kwargs)

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        logger.info(
            "Expert offload, rank %d:\n%s",
            get_parallel().tp_rank,
            residency_table(self._status(), self.manager.memory.info(), scheduler.max_total_num_tokens),
        )
        if self.on_cuda:
            bound_torch(self.config.headroom_gb)
            if self.config.residents_change:
                take_indexer_budget()
        self.manager.begin_serving()
        # The KV cache was allocated after the experts. What a check needs is allocated now, not beside the first steps.
        self.manager.check_for_evictions()
        self.manager.wait_for_moves()
        if self.layer_hooks.uncounted:
            logger.warning(
                "Expert offload: no hit rate is measured: the routing formats %s have no expert ids",
                sorted(self.layer_hooks.uncounted),
            )
        if get_observability().enable_metrics:
            from sglang_uvm_offload.plugin.operate.metrics import Metrics  # SGLang too needs Prometheus' package only here

            parallel = get_parallel()
            self.metrics = Metrics(
                self.manager,
                {
                    "model_name": get_serving().served_model_name or "",
                    "tp_rank": str(parallel.tp_rank),
                    "pp_rank": str(parallel.pp_rank),
                    "dp_rank": str(compat.dp_rank()),
                },
                self._faults,
                self.savers,
            )
            self.metrics.publish()
        if self.routed_model is not None:
            self.savers += filter(None, [profile_saver(self.manager, self.routed_model)])

    def after_internal_state(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        result.internal_state["expert_offload"] = msgspec.to_builtins(self._status())
        return result

    def _faults(self) -> dict[str, bool]:
        """For each background task of this rank, whether a fault has ended it."""
        streamer = self.layer_hooks.streamer
        found = {"moving": self.manager.fault is not None}
        if streamer is not None:
            found["streaming"] = streamer.fault is not None
        if self.recording is not None and self.recording.recorder is not None:
            found["trace"] = self.recording.recorder.stopped
        return found

    def around_set_internal_state(self, original: Callable[..., Any], scheduler: Any, request: Any, *args: Any) -> Any:
        """SGLang delivers the request to all ranks between the same two steps."""
        action = Action.of(request.server_args)
        if action is None:
            return original(scheduler, request, *args)
        refused = refusal(action, self.config)
        if refused is None:
            logger.info("Expert offload: %s requested by an operator", action)
            perform(action, self.manager, self.savers)
        return SetInternalStateReqOutput(updated=refused is None)

    def _status(self) -> RankStatus:
        """The status up to the last step launched. Waits for the device."""
        trace = None if self.recording is None else self.recording.status()
        streaming = stream_status(self.layer_hooks.streamer)
        saves = [SaveStatus(s.what, s.under_way, s.saved_at, s.failures, s.error) for s in self.savers]
        replica = compat.dp_rank()
        own = rank_status(self.manager)
        return msgspec.structs.replace(own, trace=trace, streaming=streaming, saves=saves, replica=replica)

    def after_release(self, result: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if GPU_MEMORY_TYPE_WEIGHTS in updater.offload_tags:
            self.manager.sleep()

    def after_resume(self, result: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if GPU_MEMORY_TYPE_WEIGHTS not in updater.offload_tags:
            self.manager.wake()

    def after_batch(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.metrics is not None:
            self.metrics.publish_if_due()
        self.manager.poll_if_due()
        for saver in self.savers:
            saver.save_if_due()

    def after_idle(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.metrics is not None:
            self.metrics.publish_when_idle()
        self.manager.poll_when_idle()
        for saver in self.savers:
            saver.save_when_idle()

    def after_shutdown(self, result: Any, *args: Any, **kwargs: Any) -> None:
        for saver in self.savers:
            saver.finish()


def _step_of(batch: Any) -> tuple[int, int, Phase]:
    """A step's valid batch rows, its tokens on all ranks that compute it together, and its phase."""
    mode = batch.forward_mode
    own = 0 if mode.is_idle() else len(batch.input_ids)
    phase = Phase.DECODE if mode.is_decode_or_idle() or mode.is_target_verify() else Phase.PREFILL
    everywhere = batch.global_num_tokens_cpu
    if everywhere is not None and batch.is_extend_in_batch:
        phase = Phase.PREFILL  # another rank prefills, and this one computes its tokens too
    if not get_moe_a2a_backend().is_none():
        # Experts compute tokens from other ranks; this rank does not know their number in advance.
        return ALL_ROWS, max(1, own, sum(everywhere or ())), phase
    if everywhere is None:
        return own, own, phase
    # Rows are gathered from all ranks, so padding is not at their end.
    tokens = int(sum(everywhere))
    return ALL_ROWS if tokens else 0, tokens, phase


def _ends(batch: Any) -> list[int]:
    """The row after the last row of each request of a prefill step; if rows are gathered, of each rank."""
    tokens = batch.global_num_tokens_cpu or batch.extend_seq_lens_cpu or [1] * len(batch.input_ids)  # each one decoded
    return list(accumulate(tokens))


def _is_eager(runner: Any, batch: Any, phase: Phase) -> bool:
    """Whether the step runs without a CUDA graph, given that it has enough tokens to stream: prefill graphs are captured for
    fewer (``stream_settings.graph_settings``)."""
    return phase is Phase.PREFILL or batch.batch_size > max(compat.decode_graph_sizes(runner), default=0)


def _memory(config: OffloadConfig) -> Memory:
    if config.backend == "emulated":
        return EmulatedMemory()
    from sglang_uvm_offload.cuda.memory import CudaMemory

    try:
        return CudaMemory(compat.gpu_id())
    except RuntimeError as error:
        raise FlagError([str(error)]) from error


def _counters(num_layers: int, num_experts: int) -> RoutingCounters:
    if get_device().device == "cuda":
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters

        return CudaRoutingCounters(num_layers, num_experts)
    return CpuRoutingCounters(num_layers, num_experts)


def _executor() -> ThreadPoolExecutor:
    """An executor whose thread uses this rank's GPU. A new thread starts on GPU 0, where its first call would take VRAM for a
    context."""
    gpu, on_cuda = compat.gpu_id(), get_device().device == "cuda"

    def begin() -> None:
        from sglang_uvm_offload.cuda.device import relax_capture

        torch.cuda.set_device(gpu)
        relax_capture()

    return ThreadPoolExecutor(1, "expert offload", initializer=begin if on_cuda else None)


def _broadcast_decision(decide: Callable[[], Any]) -> Any:
    """The decision of the first rank among those that hold shards of the same experts."""
    group = get_parallel().moe_tp_group
    return group.broadcast_object(decide() if group.rank_in_group == 0 else None, src=0)


def _is_first_rank() -> bool:
    parallel = get_parallel()
    return parallel.tp_rank == 0 and parallel.pp_rank == 0

"""The state of an offloading scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from sglang.srt.runtime_context import get_device, get_parallel

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.plugin.rank.backend import Emulated, backend_of
from sglang_uvm_offload.plugin.rank.built_runners import counting_flags
from sglang_uvm_offload.plugin.rank.fused_moe import LayerHooks
from sglang_uvm_offload.plugin.rank.lookup_tables import TableHooks
from sglang_uvm_offload.plugin.rank.recording import Recording
from sglang_uvm_offload.plugin.rank.start_clock import StartClock, StartPhase
from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam
from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam
from sglang_uvm_offload.plugin.slots.seam import Seam
from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.rearranging import Rearranging
from sglang_uvm_offload.routing.profile import Profile, RoutedModel
from sglang_uvm_offload.streaming.model_slots import ModelSlots

MODEL = "_expert_offload_model"
"""The attribute of SGLang's model runners that holds their ``ModelExperts``."""


class RankState:
    def __init__(self, config: RequestedConfig, compiled: bool = False):
        """``compiled``: whether ``torch.compile`` traces the steps."""
        self.config = config
        self.recording = Recording(config.trace) if config.trace is not None else None
        self.start = StartClock(config.began_at)
        self.layer_hooks = LayerHooks(counting_flags(config), self.recording, compiled, self.start.timing)
        self.tables = TableHooks(lambda: self.manager.memory, self.start.timing)
        self.seams: tuple[Seam, ...] = (TritonSlotSeam(), MarlinSlotSeam(), DeepGemmSlotSeam())
        self.scheduler: Any = None
        """SGLang's scheduler, once it is built."""
        self.slots: ModelSlots | None = None
        """The slots of the loaded target; None if no layer has any."""
        self.savers: list[Saver] = []
        self.routed_model: RoutedModel | None = None
        """The identity of the target model, once it is built."""
        self.history: Profile | None = None
        """The profile to which the server adds its own counts, once the target model is built; None for a new one."""

    @cached_property
    def backend(self) -> Emulated:
        return backend_of(self.config, get_device().gpu_id)

    @cached_property
    def manager(self) -> OffloadManager:
        """Created when the first model loads, because the process is not bound to its GPU before."""
        return OffloadManager(
            self.config,
            self.backend.memory(),
            self.backend.counters,
            _broadcast_decision,
            progress=is_first_rank,
            executor=self.backend.executor(),
            decider=self.backend.executor(),
        )

    def experts_written(self) -> None:
        """Called after expert weights may have changed."""
        if self.slots is not None:
            self.slots.bytes_written()

    def timed(self, phase: StartPhase) -> Callable[..., Any]:
        """A hook that counts the hooked function as ``phase``."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.start.timing(phase):
                return original(*args, **kwargs)

        return around

    @cached_property
    def rearranging(self) -> Rearranging:
        return Rearranging(self.manager)


def _broadcast_decision(decide: Callable[[], Any]) -> Any:
    """Broadcast the decision of the first rank to all ranks that hold shards of the same experts."""
    group = get_parallel().moe_tp_group
    return group.broadcast_object(decide() if group.rank_in_group == 0 else None, src=0)


def is_first_rank() -> bool:
    parallel = get_parallel()
    return parallel.tp_rank == 0 and parallel.pp_rank == 0

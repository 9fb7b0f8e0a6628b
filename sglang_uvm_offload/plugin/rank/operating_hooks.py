"""Hooks on a scheduler while it serves: status, metrics, actions, saving, and giving up memory."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.runtime_context import get_observability, get_parallel, get_server_args, get_serving

from sglang_uvm_offload.flags import PREFIX
from sglang_uvm_offload.plugin.launch.local_checkpoint import read_models
from sglang_uvm_offload.plugin.operate import rank_files, shared_signals
from sglang_uvm_offload.plugin.operate.actions import END, KEY, Action, fewest_tokens, perform, refusal
from sglang_uvm_offload.plugin.rank import fresh_lines
from sglang_uvm_offload.plugin.rank.buffers import stream_status
from sglang_uvm_offload.plugin.rank.chores import Chores
from sglang_uvm_offload.plugin.rank.host_memory import make_room
from sglang_uvm_offload.plugin.rank.savers import profile_saver, stats_saver
from sglang_uvm_offload.plugin.rank.state import RankState, is_first_rank
from sglang_uvm_offload.plugin.rank.vram_limits import bound_torch, take_indexer_budget
from sglang_uvm_offload.residency.status import (
    LookaheadStatus,
    RankId,
    RankStatus,
    SaveStatus,
    described,
    rank_status,
    residency_table,
)

if TYPE_CHECKING:
    from sglang_uvm_offload.plugin.operate.metrics import Metrics
    from sglang_uvm_offload.residency.manager import OffloadManager

logger = logging.getLogger(__name__)


class OperatingHooks:
    def __init__(self, rank: RankState):
        self.rank = rank
        self.metrics: Metrics | None = None
        self.chores = Chores()
        fresh_lines.install()

    def after_scheduler_init(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        self.rank.scheduler = scheduler
        logger.info(
            "Expert offload, rank %d:\n%s",
            get_parallel().tp_rank,
            residency_table(self._status(), self.rank.manager.memory.info(), scheduler.max_total_num_tokens),
        )
        if self.rank.backend.on_cuda:
            bound_torch(self.rank.config.headroom_gb)
            if self.rank.config.residents_change:
                take_indexer_budget()
                if is_first_rank():
                    ranks = get_parallel().tp_size * get_parallel().pp_size
                    make_room(ranks * self._status().resident_bytes, read_models(get_server_args()))
        if self.rank.routed_model is not None:
            self.rank.manager.fewest_tokens = fewest_tokens(self.rank.routed_model)
        self.rank.manager.begin_serving()
        # The KV cache was allocated after the experts. Check now, so that no check allocates during the first steps.
        self.rank.manager.check_for_evictions()
        self.rank.manager.wait_for_moves()
        if self.rank.layer_hooks.uncounted:
            logger.warning(
                "Expert offload: no hit rate is measured: the routing formats %s have no expert ids",
                sorted(self.rank.layer_hooks.uncounted),
            )
        if get_observability().enable_metrics:
            from sglang_uvm_offload.plugin.operate.metrics import Metrics  # like SGLang, imports prometheus_client only here

            parallel = get_parallel()
            self.metrics = Metrics(
                self.rank.manager,
                {
                    "model_name": get_serving().served_model_name or "",
                    "tp_rank": str(parallel.tp_rank),
                    "pp_rank": str(parallel.pp_rank),
                    "dp_rank": str(parallel.dp_rank or 0),
                },
                self._faults,
                self.rank.savers,
            )
            self.chores.run("publishing metrics", self.metrics.publish)
        if self.rank.routed_model is not None:
            self.rank.savers += filter(None, [profile_saver(self.rank.manager, self.rank.routed_model, self.rank.history)])
        self.rank.savers += filter(None, [stats_saver(self.rank.config.stats, self._status)])
        if self.rank.config.saves:
            shared_signals.outlive()
        self.rank.start.end()
        logger.info("Expert offload, rank %d: ready after %s", get_parallel().tp_rank, described(self.rank.start.phases()))

    def after_init_info(self, result: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """``/server_info`` shows the decided numbers in place of those of the flags."""
        decided, names = self.rank.manager.placement.config, ("num_resident", "slots", "resident_selection")
        return result | {f"{PREFIX}{name}": str(getattr(decided, name)) for name in names}

    def after_internal_state(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds the status to ``/server_info``, or leaves it out if making it fails: a request must not end the server."""

        result.internal_state[f"{PREFIX}resident_selection"] = self.rank.config.resident_selection

        def add() -> None:
            result.internal_state[KEY] = msgspec.to_builtins(self._status())

        self.chores.run("the status", add)
        return result

    def _faults(self) -> dict[str, bool]:
        """For each background task of this rank, whether a fault has ended it."""
        streamer = self.rank.layer_hooks.streamer
        found = {"moving": self.rank.manager.fault is not None}
        if streamer is not None:
            found["streaming"] = streamer.fault is not None
        if self.rank.recording is not None and self.rank.recording.recorder is not None:
            found["trace"] = self.rank.recording.recorder.stopped
        return found

    def around_set_internal_state(self, original: Callable[..., Any], scheduler: Any, request: Any, *args: Any) -> Any:
        """SGLang delivers the request to all ranks between the same two steps."""
        if request.server_args == END:
            self._begin_end()
            return SetInternalStateReqOutput(updated=True)
        if (number := rank_files.requested(request.server_args)) is not None:
            self._write_status(number)
            return SetInternalStateReqOutput(updated=True)
        action = Action.of(request.server_args)
        if action is None:
            return original(scheduler, request, *args)
        refused = refusal(action, self.rank.config)
        if refused is None:
            logger.info("Expert offload: %s requested by an operator", action)
            perform(action, self.rank.manager, self.rank.savers)
        return SetInternalStateReqOutput(updated=refused is None)

    def _begin_end(self) -> None:
        """SIGTERM or Ctrl-C: save now. The scheduler first answers all requests, or is killed before ``after_shutdown``."""
        if savers := self.rank.savers:
            logger.info("Expert offload: server ends: saving the %s", " and the ".join(saver.what for saver in savers))
        for saver in savers:
            saver.begin_end()

    def _write_status(self, number: int) -> None:
        """Every rank answers with a file: SGLang returns the answers of a few ranks only. A status that cannot be made must not
        end the server: its file is null."""
        answer: list[RankStatus | None] = [None]

        def add() -> None:
            answer[0] = self._status(wait=False)

        self.chores.run("the status", add)
        self.chores.run("writing the status", lambda: rank_files.write(number, _rank_id(self.rank.manager), answer[0]))

    def _status(self, wait: bool = True) -> RankStatus:
        """As ``rank_status``, with what this process adds."""
        trace = None if self.rank.recording is None else self.rank.recording.status()
        streaming = stream_status(self.rank.layer_hooks.streamer)
        saves = [SaveStatus(s.what, s.under_way, s.saved_at, s.failures, s.error) for s in self.rank.savers]
        own = rank_status(self.rank.manager, wait)
        ahead = None
        if self.rank.slots is not None:
            # Read on a stream of its own, the counters do not wait for the steps that are launched.
            beside = nullcontext() if wait or not self.rank.backend.on_cuda else torch.cuda.stream(torch.cuda.Stream())
            with beside:
                ahead = self.rank.slots.gain()
        return msgspec.structs.replace(
            own,
            rank=_rank_id(self.rank.manager),
            trace=trace,
            streaming=streaming,
            saves=saves,
            start=self.rank.start.phases(),
            lookahead=None if ahead is None else LookaheadStatus(*ahead),
            lookup_table_bytes=self.rank.tables.nbytes,
        )

    def after_release(self, result: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if GPU_MEMORY_TYPE_WEIGHTS in updater.offload_tags:
            self.rank.manager.sleep()

    def after_resume(self, result: Any, updater: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if GPU_MEMORY_TYPE_WEIGHTS not in updater.offload_tags:
            self.rank.manager.wake()

    def after_batch(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.metrics is not None:
            self.chores.run("publishing metrics", self.metrics.publish_if_due)
        self.chores.run("reading the routing counts", self.rank.manager.poll_if_due)
        self.chores.run("logging the last minute", self._log_minute)
        for saver in self.rank.savers:
            saver.save_if_due()

    def after_idle(self, result: Any, *args: Any, **kwargs: Any) -> None:
        if self.metrics is not None:
            self.chores.run("publishing metrics", self.metrics.publish_when_idle)
        self.chores.run("reading the routing counts", self.rank.manager.poll_when_idle)
        self.chores.run("logging the last minute", self._log_minute)
        for saver in self.rank.savers:
            saver.save_when_idle()

    def _log_minute(self) -> None:
        minutes = self.rank.manager.minutes
        if minutes is not None and (brought := minutes.ended()) is not None:
            logger.info("Expert offload, rank %d: %s", get_parallel().tp_rank, brought)

    def after_shutdown(self, result: Any, *args: Any, **kwargs: Any) -> None:
        for saver in self.rank.savers:
            saver.finish()


def _rank_id(manager: OffloadManager) -> RankId:
    parallel, layers = get_parallel(), manager.target.layers
    return RankId(parallel.dp_rank or 0, parallel.pp_rank, parallel.tp_rank, layers[0].shard.ep_rank if layers else 0)

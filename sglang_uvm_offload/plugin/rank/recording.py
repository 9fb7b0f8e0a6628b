"""Records routing traces in SGLang: decides which rank records, and which steps and rows are decoded tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_server_args

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin.launch import output_files
from sglang_uvm_offload.plugin.rank.built_model import BuiltModel
from sglang_uvm_offload.plugin.rank.lookahead import Lookahead
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.status import TraceStatus
from sglang_uvm_offload.routing.layer_routing import LayerRouting
from sglang_uvm_offload.routing.recorder import Recorder

logger = logging.getLogger(__name__)

DEFAULT_MAX_REQUESTS = 4096
"""SGLang's limit on running requests when no flag sets one."""
_FLAG = flag_name("trace")


class Recording:
    """The trace of one scheduler. Of the ranks that compute the same tokens, only the first records."""

    def __init__(self, path: Path):
        self.path = path
        self.recorder: Recorder | None = None
        self.lookahead: Lookahead | None = None
        """The guesses of later layers' experts; None if the model allows none."""

    def problems(self, model: BuiltModel) -> list[str]:
        """Why the target model's routing cannot be recorded."""
        if model.top_k is None:
            return [f"{_FLAG}: neither this model's layers nor its config give the number of experts per token"]
        if len(set(model.moe_layers)) < len(model.moe_layers):
            return [f"{_FLAG}: decoder layers of this model have several routers, of which a token uses only one"]
        return []

    def begin(
        self, model: ModelExperts, top_k: int | None, module: torch.nn.Module, layers: Sequence[torch.nn.Module]
    ) -> Saver | None:
        """Start recording the loaded target model, whose layers use ``top_k`` routed experts per token. Returns the saver, or
        None on a rank that does not record. ``module`` and its MoE ``layers`` are SGLang's."""
        parallel = get_parallel()
        if parallel.tp_rank or parallel.dp_rank or not model.layers:
            return None
        assert top_k is not None, "problems was not called"
        if self.path.exists():
            logger.warning("Expert offload: the trace file %s exists and will be replaced", self.path)
        lookahead = Lookahead(module, layers, model.num_logical, top_k)
        self.lookahead = lookahead if lookahead.guessing else None
        self.recorder = Recorder(
            self.path,
            locations=model.locations,
            top_k=top_k,
            max_rows=get_schedule().max_running_requests or DEFAULT_MAX_REQUESTS,
            device=get_device().device,
            protected=output_files.model_folders(get_server_args()),
            guessing=lookahead.guessing,
        )
        return Saver("trace", self.recorder.pending, path=self.path)

    def record(self, index: int, routing: LayerRouting, num_shared: int, hidden: torch.Tensor | None) -> None:
        """Record the routing of the model's MoE layer ``index``, and the guesses for the next layers from its input
        ``hidden[rows, width]``. In ``routing``, the ids of ``num_shared`` fused shared experts follow the routed ones. Raises
        ``FlagError`` for routing without ids."""
        recorder = self.recorder
        if recorder is None:
            return
        if routing.ids is None:
            raise FlagError(
                [f"{_FLAG}: this MoE runner shows no expert ids ({routing.form}); choose another --moe-runner-backend"]
            )
        routed = routing.ids.shape[1] - num_shared
        if routed > recorder.top_k:
            raise FlagError([f"{_FLAG}: a layer uses {routed} routed experts per token, but was built for {recorder.top_k}"])
        recorder.record(index, routing.ids[:, :routed], routing.id_format)
        if self.lookahead is not None:
            self._guess(self.lookahead, recorder, index, routing, hidden)

    def _guess(
        self, lookahead: Lookahead, recorder: Recorder, index: int, routing: LayerRouting, hidden: torch.Tensor | None
    ) -> None:
        """Record guesses. An error ends guessing and nothing else, because a model may have an unknown kind of router."""
        assert routing.ids is not None
        try:
            rows = min(len(routing.ids), recorder.max_rows)
            for guess in lookahead.guesses(index, hidden if routing.lasting else None, rows):
                recorder.record_guess(*guess)
        except Exception as error:
            self.lookahead = None
            logger.exception("Expert offload: the trace gets no more guesses: %s: %s", type(error).__name__, error)

    def after_forward(self, result: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Finish recording a launched step. Each row of a decode step of the target model is a decoded token."""
        recorder = self.recorder
        if recorder is None or runner.is_draft_worker or not batch.forward_mode.is_decode() or not batch.rids:
            return
        lengths = batch.seq_lens_cpu
        if lengths is None or len(lengths) != len(batch.rids):
            recorder.drop("the lengths of its requests are not known on the host")
            return
        recorder.end_step(batch.rids, lengths.tolist())

    def status(self) -> TraceStatus | None:
        """The recording's status in ``/server_info``; None on a rank that does not record."""
        recorder = self.recorder
        if recorder is None:
            return None
        recorder.poll()
        return TraceStatus(
            path=str(self.path),
            tokens=recorder.log.tokens,
            requests=recorder.log.requests,
            dropped_steps=recorder.dropped_steps,
            stopped=recorder.stopped,
        )

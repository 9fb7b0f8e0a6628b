"""Hooks on a forward step: they classify it, count its rows, and decide whether it streams."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from sglang.srt.layers.moe.utils import get_moe_a2a_backend

from sglang_uvm_offload.plugin.rank.state import MODEL, RankState
from sglang_uvm_offload.routing.counts import ALL_ROWS, Phase


class StepHooks:
    def __init__(self, rank: RankState):
        self.rank = rank

    def around_forward(self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a step's rows while it is launched. Nothing outside of steps (capture, warm-up kernels) is counted."""
        if self.rank.backend.on_cuda and torch.cuda.is_current_stream_capturing():  # SGLang calls this to capture a draft model
            return original(runner, batch, *args, **kwargs)
        model = runner.__dict__[MODEL]
        valid_rows, tokens, phase = step_of(batch)
        streamer = None if model.draft else self.rank.layer_hooks.streamer
        if streamer is not None and not (is_eager(runner, batch, phase) and streamer.streams(tokens)):
            streamer = None
        if streamer is not None:
            phase = Phase.PREFILL
        self.rank.manager.begin_step(model, valid_rows, tokens, phase, streams=streamer is not None)
        if self.rank.slots is not None and not model.draft:
            requests = () if phase is Phase.DECODE else self._prompts(batch)
            self.rank.slots.begin_step(valid_rows, phase, requests, streams=streamer is not None)
        try:
            if streamer is not None:
                streamer.begin_step()
            return original(runner, batch, *args, **kwargs)
        finally:
            if streamer is not None:
                streamer.end_step()
            self.rank.manager.end_step(model)

    def _prompts(self, batch: Any) -> list[tuple[int, int]]:
        """The ``Requests`` of a prefill step: the prompts that end in it or, if rows are gathered, each rank's rows."""
        gathered = batch.global_num_tokens_cpu
        tokens = gathered or batch.extend_seq_lens_cpu or [1] * len(batch.input_ids)  # all decoded
        prompts = list(pairwise(accumulate(tokens, initial=0)))
        # SGLang may warm up before a scheduler exists, and with an empty batch.
        unfinished = None if self.rank.scheduler is None else self.rank.scheduler.chunked_req
        if unfinished is not None and not gathered and unfinished.rid in (batch.rids or ()):
            del prompts[batch.rids.index(unfinished.rid)]  # continues in a later step
        return prompts

    def around_draft_graph(self, original: Callable[..., Any], graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a draft graph as one step, although it drafts several tokens."""
        model = graphs.model_runner.__dict__[MODEL]
        gathered = batch.global_num_tokens_cpu is not None or not get_moe_a2a_backend().is_none()
        rows = len(batch.positions)
        self.rank.manager.begin_step(model, ALL_ROWS if gathered else rows, rows, Phase.DECODE)
        try:
            return original(graphs, batch, *args, **kwargs)
        finally:
            self.rank.manager.end_step(model)


def step_of(batch: Any) -> tuple[int, int, Phase]:
    """A step's valid batch rows, its tokens over all ranks that compute it together, and its phase."""
    mode = batch.forward_mode
    own = 0 if mode.is_idle() else len(batch.input_ids)
    phase = Phase.DECODE if mode.is_decode_or_idle() or mode.is_target_verify() else Phase.PREFILL
    everywhere = batch.global_num_tokens_cpu
    if everywhere is not None and batch.is_extend_in_batch:
        phase = Phase.PREFILL  # another rank prefills, and this one also computes its tokens
    if not get_moe_a2a_backend().is_none():
        # Experts compute tokens from other ranks, whose number this rank does not know in advance.
        return ALL_ROWS, max(1, own, sum(everywhere or ())), phase
    if everywhere is None:
        return own, own, phase
    # Rows are gathered from all ranks, so padding is not at the end.
    tokens = int(sum(everywhere))
    return ALL_ROWS if tokens else 0, tokens, phase


def is_eager(runner: Any, batch: Any, phase: Phase) -> bool:
    """Whether a step with enough tokens to stream runs without a CUDA graph. Prefill graphs are captured only for fewer tokens
    (``prefill_graphs``)."""
    return phase is Phase.PREFILL or batch.batch_size > max(runner.decode_cuda_graph_capture_bs, default=0)

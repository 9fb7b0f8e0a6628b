"""Recording which experts each decoded token used, on the device that computes, inside CUDA graphs too.

A layer copies its ids to a buffer on the device, and that copy is captured with the layer. Once a step is launched, its rows
are copied to pinned host memory behind it, and read there some steps later, when an event says so. No step waits for that.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.routing.counts import IdFormat
from sglang_uvm_offload.routing.trace import TRACE_FILE, Trace
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Of ids in host memory; recording stops when they are full. Writing the file takes up to 1.5 times as much, while it lasts."""
RING_STEPS = 4
"""Steps whose ids may be on their way to the host. SGLang launches one step at most before it reads the tokens of the last."""


class TokenLog:
    """The ids of decoded tokens, as they came, and to which request each belongs. It only grows, so that what was there at
    some moment can be read on another thread."""

    def __init__(self, num_layers: int, num_experts: int, top_k: int, max_bytes: int):
        self.num_experts = num_experts
        self.max_tokens = max_bytes // (2 * num_layers * top_k)
        # Memory that is never activated is never taken.
        self._ids = np.empty((self.max_tokens, num_layers, top_k), dtype=np.int16)
        self._request = np.empty(self.max_tokens, dtype=np.int32)
        self.tokens = 0
        self.requests = 0
        self._running: dict[str, tuple[int, int]] = {}

    def has_room(self, tokens: int) -> bool:
        return self.tokens + tokens <= self.max_tokens

    def add(self, ids: np.ndarray, names: Sequence[str], lengths: Sequence[int]) -> None:
        """Append one step's ``ids[token, layer, k]``. Token ``i`` brings request ``names[i]`` to ``lengths[i]`` tokens. A
        request continues if the last step appended its previous token, else it begins anew."""
        end = self.tokens + len(ids)
        self._ids[self.tokens : end] = ids
        going_on = self._running
        self._running = {}
        for token, name, length in zip(range(self.tokens, end), names, lengths, strict=True):
            number = self.requests
            last = going_on.get(name)
            if last is not None and last[0] + 1 == length:
                number = last[1]
            else:
                self.requests += 1
            self._running[name] = (length, number)
            self._request[token] = number
        self.tokens = end

    def trace(self, tokens: int) -> Trace:
        """The first ``tokens`` tokens, request by request, each in its own order."""
        request = self._request[:tokens]
        ids = np.take(self._ids[:tokens], np.argsort(request, kind="stable"), axis=0)
        return Trace(ids, np.bincount(request), self.num_experts)


class _Slot:
    """Host memory for the ids of one step, and the event that tells that they have arrived."""

    def __init__(self, like: torch.Tensor):
        self.ids = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.arrived = torch.cuda.Event() if like.is_cuda else None


@dataclass(frozen=True)
class _Step:
    """A launched step. Its ids lie, or will lie, in the first rows of ``slot``."""

    slot: _Slot
    names: Sequence[str]
    lengths: Sequence[int]


class Recorder:
    """Records one rank's decode steps, and writes them to ``path``. All methods but what ``pending`` returns run on the thread
    that launches steps."""

    def __init__(
        self,
        path: Path,
        num_layers: int,
        num_experts: int,
        top_k: int,
        max_rows: int,
        device: str,
        max_bytes: int = MAX_BYTES,
        protected: atomic_file.Protected = atomic_file.NOTHING,
    ):
        """``num_experts`` are the routed ones of a layer. A step of more than ``max_rows`` tokens cannot be recorded."""
        self.path = path
        self._protected = protected
        self.top_k = top_k
        self.max_rows = max_rows
        self.log = TokenLog(num_layers, num_experts, top_k, max_bytes)
        self.dropped_steps = 0
        self.stopped = False
        self._buffer = torch.full((max_rows, num_layers, top_k), -1, dtype=torch.int16, device=device)
        self._free = [_Slot(self._buffer) for _ in range(RING_STEPS)]
        self._launched: deque[_Step] = deque()
        self._saved = 0

    def record(self, layer: int, ids: torch.Tensor, id_format: IdFormat) -> None:
        """Keep ``ids[rows, k]`` (k up to ``top_k``) of layer ``layer`` of the trace, for the step that is being computed or
        captured. Batch rows after the first ``max_rows`` are not kept."""
        kept = self._buffer[: len(ids), layer, : ids.shape[1]]
        ids = ids[: len(kept)]
        if id_format is IdFormat.PACKED:
            # The upper halves. A shift would take memory, or, with ``out``, be computed in 16 bits on a GPU.
            ids = ids.view(torch.int16)[:, 1::2]
        kept.copy_(ids)

    def end_step(self, names: Sequence[str], lengths: Sequence[int]) -> None:
        """A decode step was launched on the current stream. Row ``i`` of its batch is the token that brings request
        ``names[i]`` to ``lengths[i]`` tokens."""
        self.poll()
        if self.stopped:
            return
        if len(names) > self.max_rows:
            self.drop(f"it has {len(names)} requests, and there is room for {self.max_rows}")
        elif len(set(names)) < len(names):
            self.drop("several of its tokens are of one request")
        elif not self._free:
            self.drop("the steps before it are still on their way from the device")
        else:
            slot = self._free.pop()
            slot.ids[: len(names)].copy_(self._buffer[: len(names)], non_blocking=True)
            if slot.arrived is not None:
                slot.arrived.record()
            self._launched.append(_Step(slot, names, lengths))

    def drop(self, reason: str) -> None:
        """A decode step cannot be recorded. The requests that go on after it begin anew in the trace."""
        self.dropped_steps += 1
        if self.dropped_steps == 1:
            logger.warning("Expert offload: trace: a decode step is not recorded: %s. Further ones are only counted.", reason)

    def poll(self, wait: bool = False) -> None:
        """Take over the steps whose ids have arrived, in order; with ``wait`` all that were launched."""
        while self._launched and not self.stopped:
            step = self._launched[0]
            arrived = step.slot.arrived
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._take(step.slot.ids[: len(step.names)].numpy(), step)
            self._free.append(self._launched.popleft().slot)

    def _take(self, ids: np.ndarray, step: _Step) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < -1 or high >= self.log.num_experts:
            self.stopped = True
            logger.error(
                "Expert offload: trace: recording stopped: routing came with the expert ids %d to %d, and the model has "
                "experts 0 to %d. What was recorded before is saved.",
                low,
                high,
                self.log.num_experts - 1,
            )
        elif not self.log.has_room(len(ids)):
            self.stopped = True
            logger.warning(
                "Expert offload: trace: recording stopped after %d tokens, which is all that %s hold. They are saved to %s.",
                self.log.tokens,
                size(self.log.tokens * ids[0].nbytes),
                self.path,
            )
        else:
            self.log.add(ids, step.names, step.lengths)

    def pending(self, wait: bool) -> Callable[[], None] | None:
        """What saves all that has arrived, None where that is saved already. It may run on another thread, and raises
        ``OSError``. With ``wait`` all launched steps are taken over first."""
        self.poll(wait)
        tokens = self.log.tokens
        return None if tokens == self._saved else lambda: self._save(tokens)

    def _save(self, tokens: int) -> None:
        trace = self.log.trace(tokens)
        atomic_file.replace(self.path, trace.save, TRACE_FILE, self._protected)
        self._saved = tokens
        logger.info(
            "Expert offload: trace: %d tokens of %d requests saved to %s (%d steps not recorded)",
            tokens,
            trace.num_requests,
            self.path,
            self.dropped_steps,
        )

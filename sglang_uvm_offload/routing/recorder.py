"""Records the experts of each decoded token on the compute device, also inside CUDA graphs.

Each layer copies its ids to a device buffer, next to its guesses for the following layers; graphs capture these copies. After a
step is launched, its rows are copied to pinned host memory in stream order. They are read some steps later, when an event shows
that they have arrived. No step waits for them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.routing.counts import IdFormat
from sglang_uvm_offload.routing.guesses import Guesses
from sglang_uvm_offload.routing.trace import TRACE_FILE, Trace
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Host memory for ids and guesses. Recording stops when it is full. Writing the file temporarily takes up to 1.5 times as
much."""
RING_STEPS = 4
"""Steps whose ids may be in flight to the host. SGLang launches at most one step before it reads the last one's tokens."""


@dataclass(frozen=True, eq=False)
class Guessing:
    """The guesses to record: ``most`` experts per layer and distance. ``folded``: as in ``Guesses``."""

    folded: np.ndarray
    most: int

    @property
    def width(self) -> int:
        """Guesses per layer."""
        return self.folded.shape[1] * self.most


class TokenLog:
    """The ids and guesses of decoded tokens in order of arrival, and the request of each token. The log is append-only, so
    another thread can read a prefix while it grows."""

    def __init__(self, num_experts: int, top_k: int, guessing: Guessing, max_bytes: int):
        self.num_experts = num_experts
        self.top_k = top_k
        self.guessing = guessing
        num_layers, width = len(guessing.folded), top_k + guessing.width
        self.max_tokens = max_bytes // (2 * num_layers * width)
        # The operating system commits only pages that are written.
        self._ids = np.empty((self.max_tokens, num_layers, width), dtype=np.int16)
        self._request = np.empty(self.max_tokens, dtype=np.int32)
        self.tokens = 0
        self.requests = 0
        self._running: dict[str, tuple[int, int]] = {}

    def has_room(self, tokens: int) -> bool:
        return self.tokens + tokens <= self.max_tokens

    def add(self, ids: np.ndarray, names: Sequence[str], lengths: Sequence[int]) -> None:
        """Append one step's ``ids[token, layer, k + guesses]``. With token ``i``, request ``names[i]`` reaches ``lengths[i]``
        tokens. A request continues if the last step appended its previous token; otherwise it starts anew."""
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
        """The first ``tokens`` tokens, grouped by request, in order within each."""
        request = self._request[:tokens]
        rows = np.take(self._ids[:tokens], np.argsort(request, kind="stable"), axis=0)
        ids, guessed, folded = rows[..., : self.top_k], rows[..., self.top_k :], self.guessing.folded
        guesses = Guesses(guessed.reshape(tokens, *folded.shape, self.guessing.most), folded) if self.guessing.width else None
        return Trace(ids, np.bincount(request), self.num_experts, guesses)


class _Slot:
    """Host memory for one step's ids, and the event recorded after their copy."""

    def __init__(self, like: torch.Tensor):
        self.ids = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
        self.arrived = torch.cuda.Event() if like.is_cuda else None


@dataclass(frozen=True)
class _Step:
    """A launched step, whose ids arrive in the first rows of ``slot``."""

    slot: _Slot
    names: Sequence[str]
    lengths: Sequence[int]


class Recorder:
    """Records one rank's decode steps and writes them to ``path``. All methods run on the thread that launches steps; only the
    function that ``pending`` returns may run on another thread."""

    def __init__(
        self,
        path: Path,
        locations: Sequence[ExpertLocation],
        top_k: int,
        max_rows: int,
        device: str,
        max_bytes: int = MAX_BYTES,
        protected: atomic_file.Protected = atomic_file.NOTHING,
        guessing: Guessing | None = None,
    ):
        """``locations``: where each layer's experts are; they must not change. Steps of more than ``max_rows`` tokens cannot be
        recorded."""
        self.path = path
        self._protected = protected
        self.top_k = top_k
        self.max_rows = max_rows
        num_layers, places = len(locations), max(where.experts.size for where in locations)
        self.guessing = guessing or Guessing(np.zeros((num_layers, 0), dtype=bool), 0)
        self.log = TokenLog(max(where.num_experts for where in locations), top_k, self.guessing, max_bytes)
        self._expert_at = np.full((num_layers, places + 1), -1, dtype=np.int16)
        """The checkpoint's expert id at each place. The last place holds -1, for no expert."""
        for row, where in zip(self._expert_at, locations, strict=True):
            row[: where.experts.size] = where.experts
        self.dropped_steps = 0
        self.stopped = False
        shape = (max_rows, num_layers, top_k + self.guessing.width)
        self._buffer = torch.full(shape, -1, dtype=torch.int16, device=device)
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

    def record_guess(self, layer: int, distance: int, experts: torch.Tensor) -> None:
        """Keep ``experts[rows, most]``, ordered, which were guessed for layer ``layer`` of the trace ``distance`` (from 1)
        layers before it, in the step that is being computed or captured. They are ids of the checkpoint."""
        begin = self.top_k + (distance - 1) * self.guessing.most
        kept = self._buffer[: len(experts), layer, begin : begin + self.guessing.most]
        kept.copy_(experts[: len(kept)])

    def end_step(self, names: Sequence[str], lengths: Sequence[int]) -> None:
        """Record the decode step that was just launched on the current stream. With row ``i`` of its batch, request
        ``names[i]`` reaches ``lengths[i]`` tokens."""
        self.poll()
        if self.stopped:
            return
        if len(names) > self.max_rows:
            self.drop(f"it has {len(names)} requests; at most {self.max_rows} can be recorded")
        elif len(set(names)) < len(names):
            self.drop("several of its tokens are of one request")
        elif not self._free:
            self.drop("the ids of earlier steps have not arrived from the device")
        else:
            slot = self._free.pop()
            slot.ids[: len(names)].copy_(self._buffer[: len(names)], non_blocking=True)
            if slot.arrived is not None:
                slot.arrived.record()
            self._launched.append(_Step(slot, names, lengths))

    def drop(self, reason: str) -> None:
        """Skip a decode step that cannot be recorded. Requests that continue after it start anew in the trace."""
        self.dropped_steps += 1
        if self.dropped_steps == 1:
            logger.warning("Expert offload: trace: a decode step is not recorded: %s. Further ones are only counted.", reason)

    def poll(self, wait: bool = False) -> None:
        """Append the steps whose ids have arrived, in order; with ``wait``, all launched steps. An error, such as a lack of
        memory, ends only the recording."""
        try:
            self._append_arrived(wait)
        except Exception as error:
            self.stopped = True
            logger.exception(
                "Expert offload: trace: recording stopped: %s: %s. Serving continues, and earlier steps are saved.",
                type(error).__name__,
                error,
            )

    def _append_arrived(self, wait: bool) -> None:
        while self._launched and not self.stopped:
            step = self._launched[0]
            arrived = step.slot.arrived
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._append(step.slot.ids[: len(step.names)].numpy(), step)
            self._free.append(self._launched.popleft().slot)

    def _append(self, rows: np.ndarray, step: _Step) -> None:
        ids, guesses = rows[..., : self.top_k], rows[..., self.top_k :]
        low, high = int(ids.min()), int(ids.max())
        places = self._expert_at.shape[1] - 1
        if low < -1 or high >= places:
            self.stopped = True
            logger.error(
                "Expert offload: trace: recording stopped: the routing has expert ids %d to %d, and the model has experts 0 to "
                "%d. Earlier steps are saved.",
                low,
                high,
                places - 1,
            )
        elif not self.log.has_room(len(ids)):
            self.stopped = True
            logger.warning(
                "Expert offload: trace: recording stopped after %d tokens: the limit of %s is reached. They are saved to %s.",
                self.log.tokens,
                size(self.log.tokens * rows[0].nbytes),
                self.path,
            )
        else:
            layers = np.arange(len(self._expert_at))[:, None]
            experts = self._expert_at[layers, ids]
            self.log.add(np.concatenate([experts, guesses], axis=-1), step.names, step.lengths)

    def pending(self, wait: bool) -> Callable[[], None] | None:
        """A function that saves everything that has arrived; None if all of it is saved. It may run on another thread, and
        raises ``OSError``. With ``wait``, all launched steps are included."""
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

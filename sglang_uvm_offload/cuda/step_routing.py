"""The routing of a step's layers, counted together by one launch when its last layer has been routed.

A launch for each layer took 2.6 % of a decode step of 75 layers at batch 1 (GPU_STATUS.md). The ids stay where the router wrote
them: until they are counted, a reference keeps their memory from being given to anybody else, in a graph's pool too.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from sglang_uvm_offload.cuda.ops import CudaOps
from sglang_uvm_offload.cuda.structs import Counted

logger = logging.getLogger(__name__)

MOST_IDS = 1 << 14
"""Of a layer that waits. A step with more takes long, and its ids would take VRAM that nobody planned."""


class _Alike(NamedTuple):
    """What layers that are counted together have in common."""

    packed: bool
    first_expert: int
    dtype: torch.dtype
    top_k: int


class StepRouting:
    """One thread at a time may use it. Where a step's last layer is not routed, what waits is counted when the next step
    begins, and each layer at once from then on: a graph of such a step would not count it."""

    def __init__(self, ops: CudaOps, control: torch.Tensor, counts: torch.Tensor):
        """``counts`` int64 ``[layers, 2, 2, experts]``."""
        self._ops, self._control, self._counts = ops, control, counts
        self._waiting: list[Counted] = []
        self._alike: _Alike | None = None
        self._captured = False
        self._stream = torch.cuda.current_stream(counts.device)
        """That which wrote the ids that wait."""
        self._waits = True

    def count(self, routing: Counted, packed: bool, first_expert: int, lasting: bool) -> None:
        """Count a layer now, or with the step's last one if its ids are ``lasting``."""
        ids, last = routing.ids, routing.layer == len(self._counts) - 1
        alike = _Alike(packed, first_expert, ids.dtype, ids.size(1))
        if self._waiting and (routing.layer < self._waiting[-1].layer or self._captured != _capturing()):
            self.end_early()
        if self._waiting and (alike != self._alike or len(self._waiting) == self._ops.max_counted):
            self._count()
        intact = [other for other in self._waiting if other.ids.data_ptr() != ids.data_ptr()]
        if len(intact) < len(self._waiting):  # the layers write to one buffer after all
            self._waits, self._waiting = False, intact
        if ids.numel() and lasting and self._waits and ids.numel() <= MOST_IDS:
            self._join()
            self._alike, self._captured = alike, _capturing()
            self._waiting.append(routing)
        elif ids.numel():
            self._ops.count_routing([routing], packed, first_expert, self._control, self._counts)
        if last:
            self._count()

    def end_early(self) -> None:
        """Count what waits, if anything does: its step has ended."""
        if not self._waiting:
            return
        self._waits = False
        if self._captured == _capturing():
            self._count()
            return
        self._waiting = []
        logger.warning(
            "Expert offload: a CUDA graph was captured of a step that does not reach the last MoE layer; its routing is not "
            "counted. Answers are not affected."
        )

    def _count(self) -> None:
        if self._waiting:
            assert self._alike is not None
            self._join()
            layers, self._waiting = self._waiting, []
            self._ops.count_routing(layers, self._alike.packed, self._alike.first_expert, self._control, self._counts)

    def _join(self) -> None:
        """The current stream reads the ids that wait, which another one may have written."""
        stream = torch.cuda.current_stream(self._counts.device)
        if self._waiting and stream != self._stream:
            stream.wait_stream(self._stream)
            for routing in self._waiting:
                routing.ids.record_stream(stream)
        self._stream = stream


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()

"""Counts the routing of all layers of a step in one launch, after the last layer is routed.

One launch per layer took 2.6 % of a decode step of 75 layers at batch 1 (GPU_STATUS.md). The ids stay where the router wrote
them. A reference keeps their memory from being reused until they are counted, also in a graph's pool.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from sglang_uvm_offload.cuda.ops import CudaOps
from sglang_uvm_offload.cuda.structs import Counted

logger = logging.getLogger(__name__)

MOST_IDS = 1 << 14
"""The most ids of a layer that waits. A step with more is long anyway, and its ids would take unplanned VRAM."""


class _Alike(NamedTuple):
    """What layers that are counted together must have in common."""

    packed: bool
    first_expert: int
    dtype: torch.dtype
    top_k: int


class StepRouting:
    """The routing of a step's layers that waits to be counted. Use from one thread at a time.

    If a step never routes the last layer, its waiting layers are counted when the next step begins. From then on, each layer is
    counted immediately, because a graph of such a step would not count them.
    """

    def __init__(self, ops: CudaOps, control: torch.Tensor, counts: torch.Tensor):
        """``counts`` is int64 ``[layers, 2, 2, experts]``."""
        self._ops, self._control, self._counts = ops, control, counts
        self._waiting: list[Counted] = []
        self._alike: _Alike | None = None
        self._captured = False
        self._stream = torch.cuda.current_stream(counts.device)
        """The stream that wrote the waiting ids."""
        self._waits = True

    def count(self, routing: Counted, packed: bool, first_expert: int, lasting: bool) -> None:
        """Count a layer now or, if its ids are ``lasting``, together with the step's last layer."""
        ids, last = routing.ids, routing.layer == len(self._counts) - 1
        alike = _Alike(packed, first_expert, ids.dtype, ids.size(1))
        if self._waiting and (routing.layer < self._waiting[-1].layer or self._captured != _capturing()):
            self.end_early()
        if self._waiting and (alike != self._alike or len(self._waiting) == self._ops.max_counted):
            self._count()
        intact = [other for other in self._waiting if other.ids.data_ptr() != ids.data_ptr()]
        if len(intact) < len(self._waiting):  # layers reuse one buffer after all
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
        """Count the waiting layers, if any, because their step has ended."""
        if not self._waiting:
            return
        self._waits = False
        if self._captured == _capturing():
            self._count()
            return
        self._waiting = []
        logger.warning(
            "Expert offload: a CUDA graph was captured for a step that does not reach the last MoE layer; its routing is not "
            "counted. Outputs are unaffected."
        )

    def _count(self) -> None:
        if self._waiting:
            assert self._alike is not None
            self._join()
            layers, self._waiting = self._waiting, []
            self._ops.count_routing(layers, self._alike.packed, self._alike.first_expert, self._control, self._counts)

    def _join(self) -> None:
        """Let the current stream read the waiting ids, which another stream may have written."""
        stream = torch.cuda.current_stream(self._counts.device)
        if self._waiting and stream != self._stream:
            stream.wait_stream(self._stream)
            for routing in self._waiting:
                routing.ids.record_stream(stream)
        self._stream = stream


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()

"""``routing.RoutingCounters`` on a GPU: a small kernel at the end of each step, captured into CUDA graphs with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_uvm_offload.cuda.ops import device_ops
from sglang_uvm_offload.cuda.step_routing import StepRouting
from sglang_uvm_offload.cuda.structs import Counted
from sglang_uvm_offload.routing.counts import IdFormat, PendingCounts, Phase, RoutingCounts


class CudaRoutingCounters:
    """Counts and two control words at fixed GPU addresses, so that captured kernels find them at each replay. A step's valid
    rows and phase are written to the control words in stream order, outside the graph."""

    def __init__(self, num_layers: int, num_experts: int):
        device = torch.cuda.current_device()
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._ops = device_ops(device)
        self._counts = torch.zeros(num_layers, 2, 2, num_experts, dtype=torch.int64).to(device)
        self.control = torch.zeros(2, dtype=torch.int64).to(device)
        """int64 ``[2]``: the valid rows and phase of the current step, in stream order."""
        self.slot_table: torch.Tensor | None = None
        """The table of the slots, whose steps begin with the counters'."""
        self._slots: torch.Tensor | None = None
        self._steps = [0, 0]
        self._snapshots = [torch.zeros_like(self._counts)]
        self._copy_stream = torch.cuda.Stream(device)
        self._waiting = StepRouting(self._ops, self.control, self._counts)
        self._stream = torch.cuda.current_stream(device)
        """The stream of the last step. The caller of ``read_async`` may be on another one."""

    def slot_counts(self) -> torch.Tensor:
        """int64 ``[layers, 2, 4, experts]`` that ``CudaSlots`` adds to. Read as ``RoutingCounts.slots``."""
        if self._slots is None:
            self._slots = torch.zeros(self.num_layers, 2, 4, self.num_experts, dtype=torch.int64).to(self._counts.device)
            self._snapshots.append(torch.zeros_like(self._slots))
        return self._slots

    def begin_step(self, valid_rows: int, phase: Phase) -> None:
        self._waiting.end_early()
        self._steps[phase] += valid_rows > 0
        self._stream = torch.cuda.current_stream(self._counts.device)
        self._ops.begin_step(self.control, valid_rows, int(phase), self.slot_table if valid_rows else None)

    def count(
        self,
        layer: int,
        ids: torch.Tensor,
        first_expert: int,
        id_format: IdFormat,
        *,
        in_place: bool = True,
        lasting: bool = False,
    ) -> None:
        packed = id_format is IdFormat.PACKED
        self._ops.check_ids(ids, packed)
        self._waiting.count(Counted(layer, ids, in_place), packed, first_expert, lasting)

    def count_histogram(self, layer: int, histogram: torch.Tensor, *, in_place: bool = True) -> None:
        self._ops.count_histogram(histogram, self.control, self._counts[layer], in_place=in_place)

    def read(self) -> RoutingCounts:
        return self.read_async().wait()

    def read_async(self) -> PendingCounts:
        with torch.cuda.stream(self._stream):
            self._waiting.end_early()
        # Snapshot on the GPU in stream order, to exclude the next step's counts. Copy it to the host on a second stream: that
        # copy may wait for experts moving to host RAM, which the next step must not.
        self._stream.wait_stream(self._copy_stream)
        now = [self._counts] if self._slots is None else [self._counts, self._slots]
        with torch.cuda.stream(self._stream):
            for snapshot, counts in zip(self._snapshots, now, strict=True):
                snapshot.copy_(counts)
        self._copy_stream.wait_stream(self._stream)
        there = [torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True) for counts in now]
        with torch.cuda.stream(self._copy_stream):
            for target, snapshot in zip(there, self._snapshots, strict=True):
                target.copy_(snapshot, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._copy_stream)
        return _InFlightCounts(there, (self._steps[0], self._steps[1]), copied)


@dataclass(frozen=True)
class _InFlightCounts:
    there: list[torch.Tensor]
    steps: tuple[int, int]
    copied: torch.cuda.Event

    def ready(self) -> bool:
        return self.copied.query()

    def wait(self) -> RoutingCounts:
        self.copied.synchronize()
        counts, *slots = (tensor.numpy() for tensor in self.there)
        return RoutingCounts(counts, self.steps, slots[0] if slots else None)

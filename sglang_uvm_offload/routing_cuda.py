"""``routing.RoutingCounters`` on a GPU: one small kernel a layer, captured into CUDA graphs with the rest of the step."""

from __future__ import annotations

import torch

from sglang_uvm_offload.cuda_ops import device_ops
from sglang_uvm_offload.routing import IdFormat, Phase, RoutingCounts


class CudaRoutingCounters:
    """The counts and the two control words lie on the GPU from the start, so a captured kernel finds them at each replay; a
    step's rows and phase are written to them in stream order, outside the graph."""

    def __init__(self, num_layers: int, num_experts: int):
        device = torch.cuda.current_device()
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._ops = device_ops(device)
        self._counts = torch.zeros(num_layers, 2, 2, num_experts, dtype=torch.int64, device=device)
        self._control = torch.zeros(2, dtype=torch.int64, device=device)
        self._steps = [0, 0]
        self._copy = torch.zeros(self._counts.shape, dtype=torch.int64, pin_memory=True)
        self._copy_stream = torch.cuda.Stream(device)
        self._copied: torch.cuda.Event | None = None
        self._copied_steps = (0, 0)

    def begin_step(self, rows: int, phase: Phase) -> None:
        self._steps[phase] += rows > 0
        self._ops.set_control(self._control, rows, int(phase))

    def count(self, layer: int, ids: torch.Tensor, first_expert: int, id_format: IdFormat) -> None:
        packed = id_format is IdFormat.PACKED
        self._ops.count_routing(ids, packed, first_expert, self._control, self._counts[layer])

    def count_histogram(self, layer: int, histogram: torch.Tensor) -> None:
        self._ops.count_histogram(histogram, self._control, self._counts[layer])

    def read(self) -> RoutingCounts:
        torch.cuda.synchronize(self._counts.device)
        self._copied = None  # what it brought is older than what is returned now
        return RoutingCounts(self._counts.cpu().numpy(), (self._steps[0], self._steps[1]))

    def poll(self) -> RoutingCounts | None:
        done = None
        if self._copied is not None:
            if not self._copied.query():
                return None
            done = RoutingCounts(self._copy.numpy().copy(), self._copied_steps)
        # A stream of its own: the counts only grow, so a copy beside a running step is some steps old at worst.
        with torch.cuda.stream(self._copy_stream):
            self._copy.copy_(self._counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(self._copy_stream)
        self._copied_steps = (self._steps[0], self._steps[1])
        return done

"""A rank's device backend: CUDA unified memory or its emulation on a CPU, and the components built on it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.link import LinkTimer, Offloaded
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.memory.slots import ExpertSlots, SlotLayer
from sglang_uvm_offload.memory.staging import Staging
from sglang_uvm_offload.residency.budget import DRIVER_BYTES
from sglang_uvm_offload.routing.counts import RoutingCounters

logger = logging.getLogger(__name__)

_THREAD = "expert offload"


class Emulated:
    """The backend of a CPU."""

    on_cuda = False

    def memory(self) -> Memory:
        return EmulatedMemory()

    def counters(self, num_layers: int, num_experts: int) -> RoutingCounters:
        return CpuRoutingCounters(num_layers, num_experts)

    def slots(
        self, counters: RoutingCounters, ahead: bool, layers: Sequence[SlotLayer | None], slots: Sequence[int]
    ) -> ExpertSlots:
        """``slots`` is the number of slots of each pool. ``ahead`` enables lookahead."""
        assert isinstance(counters, CpuRoutingCounters)
        return CpuSlots(counters, layers, slots, ahead=ahead)

    def staging(self, memory: Memory, nbytes: int, count: int) -> Staging:
        """``count`` stream buffers of ``nbytes``."""
        return CpuStaging(memory, nbytes, count)

    def reclaim(self, memory: Memory, nbytes: int) -> None:
        """Make ``nbytes`` of VRAM that demoted experts left count as free."""

    def link_timer(self, offloaded: Sequence[Offloaded]) -> LinkTimer | None:
        """None on a CPU, where nothing crosses a link. Raises ``RuntimeError``."""
        return None

    def executor(self) -> Executor:
        """A thread for work alongside the steps. It is already started, because a serving process may be denied new threads."""
        return _begun(ThreadPoolExecutor(1, _THREAD))


class Cuda(Emulated):
    """The backend of a GPU. Methods import lazily, so that a CPU server needs no CUDA."""

    on_cuda = True

    def __init__(self, gpu: int):
        self._gpu = gpu

    def memory(self) -> Memory:
        """Raises ``FlagError``."""
        from sglang_uvm_offload.cuda.memory import CudaMemory

        try:
            return CudaMemory(self._gpu)
        except RuntimeError as error:
            raise FlagError([str(error)]) from error

    def counters(self, num_layers: int, num_experts: int) -> RoutingCounters:
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters

        return CudaRoutingCounters(num_layers, num_experts)

    def slots(
        self, counters: RoutingCounters, ahead: bool, layers: Sequence[SlotLayer | None], slots: Sequence[int]
    ) -> ExpertSlots:
        from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
        from sglang_uvm_offload.cuda.overlap import with_overlap
        from sglang_uvm_offload.cuda.slots import CudaSlots

        assert isinstance(counters, CudaRoutingCounters)
        return with_overlap(CudaSlots(counters, layers, slots, ahead=ahead))

    def staging(self, memory: Memory, nbytes: int, count: int) -> Staging:
        """Raises ``torch.OutOfMemoryError``."""
        from sglang_uvm_offload.cuda.staging import CudaStaging

        return CudaStaging(self._gpu, nbytes, count)

    def reclaim(self, memory: Memory, nbytes: int) -> None:
        """The driver keeps such VRAM until a plain allocation needs it (``uvm_pmm_gpu.c`` evicts unused root chunks first). So
        allocate all free VRAM plus ``nbytes`` once, and free it."""
        torch.cuda.empty_cache()
        wanted = memory.info().device_free + nbytes - DRIVER_BYTES
        if wanted <= 0:
            return
        try:
            torch.empty(wanted, dtype=torch.uint8, device=f"cuda:{self._gpu}")
        except torch.OutOfMemoryError:
            logger.info("Expert offload: the driver still holds VRAM of demoted experts; the KV cache will be smaller")
        torch.cuda.empty_cache()

    def link_timer(self, offloaded: Sequence[Offloaded]) -> LinkTimer:
        from sglang_uvm_offload.cuda.link import CudaLinkTimer

        return CudaLinkTimer(self._gpu, offloaded)

    def executor(self) -> Executor:
        """A started thread on this rank's GPU. By default a new thread uses GPU 0, where its first call would create a context
        and take VRAM."""

        def begin() -> None:
            from sglang_uvm_offload.cuda.device import relax_capture

            torch.cuda.set_device(self._gpu)
            relax_capture()

        return _begun(ThreadPoolExecutor(1, _THREAD, initializer=begin))


def _begun(thread: ThreadPoolExecutor) -> ThreadPoolExecutor:
    thread.submit(int).result()
    return thread


def backend_of(config: Settings, gpu: int) -> Emulated:
    """The backend of ``config``. ``gpu`` is the GPU of this process."""
    return Cuda(gpu) if config.backend == "uvm" else Emulated()

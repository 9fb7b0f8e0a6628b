"""One planning case, and the VRAM that SGLang grants a rank for weights and KV cache."""

from __future__ import annotations

import dataclasses
from functools import cached_property

from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.plan import sglang_memory
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.lookup_tables import VRAM
from sglang_uvm_offload.plan.machine import GIB, Machine
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Vram
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots


@dataclasses.dataclass(frozen=True)
class GrantedVram:
    """The part of ``case.Case`` that sets a rank's budget."""

    model: ModelShape
    machine: Machine
    workload: Workload
    parallel: Parallel
    reserve: Reserve = dataclasses.field(default_factory=Reserve)
    assumed: Assumptions = dataclasses.field(default_factory=Assumptions)
    slots: Slots = NO_SLOTS
    tables_in: str = VRAM
    """Where lookup tables are kept, if SGLang can keep them there."""
    block_bytes: int = BLOCK_BYTES
    """The memory backend's residency granularity, in bytes."""

    @cached_property
    def defaults(self) -> sglang_memory.Defaults:
        return sglang_memory.defaults(
            self.machine.vram_bytes,
            tp=self.parallel.tp,
            pp=self.parallel.pp,
            dp_attention=self.parallel.dp if self.parallel.dp_attention else 1,
            latent_attention=bool(self.model.kv.latent),
            max_running_requests=self.workload.running_requests(self.parallel),
            chunked_prefill_size=self.reserve.chunked_prefill_size,
        )

    @cached_property
    def fraction(self) -> float:
        given = self.reserve.mem_fraction_static
        return self.defaults.mem_fraction_static if given is None else given

    @property
    def taken_before_loading(self) -> int:
        """VRAM that the server's processes take before the model loads."""
        return int((self.assumed.context_gib + (self.assumed.collectives_gib if self.parallel.ranks > 1 else 0)) * GIB)

    @property
    def free_vram(self) -> int:
        """Free VRAM of one GPU before the server starts. For an integrated GPU, the host's available memory, as in SGLang's
        ``get_available_gpu_memory``."""
        free, machine = self.reserve.free_vram_bytes, self.machine
        free = machine.vram_bytes if free is None else free
        return min(free, machine.pool_bytes) if machine.one_memory else free

    @cached_property
    def budget(self) -> int:
        """Bytes for weights and KV cache on a rank: the static fraction of the VRAM that is free before loading, minus the
        headroom. At least 0, because both factors may be negative on a small GPU."""
        free = self.free_vram
        granted = self.fraction - self.reserve.headroom_gb * GIB / self.machine.vram_bytes
        return max(0, int(max(0, free - self.taken_before_loading) * max(0.0, granted)))

    @property
    def vram(self) -> Vram:
        """How a GPU is divided. Parts that exceed the GPU's memory are cut off."""
        total = self.machine.vram_bytes
        free = min(self.free_vram, total)
        runtime = min(self.taken_before_loading, free)
        rest = free - runtime - self.budget
        sglang = min(rest, int((free - runtime) * (1 - max(0.0, self.fraction))))
        return Vram(total - free, runtime, sglang, rest - sglang, self.budget)

"""The experts of one MoE layer on one rank: their tensors, and which of them are resident."""

from __future__ import annotations

import numpy as np
import torch

from sglang_uvm_offload.experts.takeover import expert_tensors, move_into_managed
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Memory, Span
from sglang_uvm_offload.units import size

MAX_SHRINK_FACTOR = 8
"""How far post-load processing may shrink a layer's bytes: 16 bits may become 4, with scales. If 4-bit weights went elsewhere,
the scales that remain are a ninth."""


def check_host_ram(memory: Memory, call: str, name: str, needed: int) -> None:
    """Raise ``ManagedMemoryError`` if ``call`` needs ``needed`` bytes of host RAM that are not free: the kernel would kill some
    process for them."""
    room = memory.info().host_available - host_margin(needed) if needed else 0
    if needed > room:
        raise ManagedMemoryError(
            call,
            name,
            Span(0, needed),
            f"offloaded experts need {size(needed)} of host RAM, and {size(max(room, 0))} is left "
            f"({size(host_margin(needed))} is kept for other uses)",
        )


class ExpertsLost(RuntimeError):
    """A layer's weights are no longer found in its modules, so they can be neither offloaded nor counted."""


class ExpertLayer:
    """``num_experts`` local experts. The last ``num_shared`` are fused shared experts, which every token uses, so they are
    always resident. Local expert 0 is the model's expert ``first_expert``."""

    def __init__(
        self, memory: Memory, layer_id: int, num_experts: int, num_shared: int, first_expert: int, resident: np.ndarray
    ):
        self.memory = memory
        self.layer_id = layer_id
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.always_resident = np.arange(num_experts) >= num_experts - num_shared
        self.resident = resident | self.always_resident
        """``bool[num_experts]``: the experts all of whose managed bytes are in VRAM, or moving there."""
        self._has_host_room = ~self.resident
        self.tensors: list[ExpertTensor] = []
        self.plain_bytes = 0
        """Bytes of expert tensors left in ordinary VRAM: too small to place, or with interleaved experts."""
        self._synced_bytes = 0
        """Bytes of all expert tensors at the last ``sync_tensors``."""

    def allocate(self, expert_bytes: int, device: torch.device, description: str) -> torch.Tensor | None:
        """``takeover.Allocate`` for this layer: managed and placed, or None if an expert does not fill a page."""
        if device.type != self.memory.device_type or not ExpertLayout(self.num_experts, expert_bytes).placeable:
            return None
        name = f"{description} of MoE layer {self.layer_id}"
        check_host_ram(self.memory, "allocate", name, int((~self.resident).sum()) * expert_bytes)
        tensor = ExpertTensor(self.memory, name, self.num_experts, expert_bytes)
        flat = tensor.bytes()
        tensor.place(self.resident)
        self.tensors.append(tensor)
        return flat

    def sync_tensors(self, *holders: object) -> None:
        """Call it after code that may have replaced tensors of the ``holders`` (the layer's module and its quantisation
        method): takes over new tensors and drops freed ones. Raises ``ExpertsLost`` if nearly all bytes are gone."""
        move_into_managed(holders, self.num_experts, self._is_managed, self.allocate)
        managed: set[int] = set()
        plain: dict[int, int] = {}
        for held in expert_tensors(holders, self.num_experts):
            storage = held.tensor.untyped_storage()
            if self._is_managed(held.tensor):
                managed.add(storage.data_ptr())
            elif held.tensor.device.type != "meta":
                plain[storage.data_ptr()] = storage.nbytes()
        self.tensors = [tensor for tensor in self._live_tensors() if tensor.address in managed]
        self.plain_bytes = sum(plain.values())
        before = self._synced_bytes
        self._synced_bytes = sum(tensor.layout.nbytes for tensor in self.tensors) + self.plain_bytes
        if self._synced_bytes < before / MAX_SHRINK_FACTOR:
            lost, experts = size(before - self._synced_bytes), f"the experts of MoE layer {self.layer_id}"
            raise ExpertsLost(f"after loading, {lost} of the {size(before)} of {experts} are not found in the layer")

    def host_bytes_to_demote(self, after: np.ndarray) -> int:
        """Host RAM that ``demote`` takes. An expert keeps its room there when it moves back to VRAM."""
        return int((self.resident & ~after & ~self._has_host_room).sum()) * self.expert_bytes

    def demote(self, after: np.ndarray) -> int:
        """Move residents that are not in ``after`` (``bool[num_experts]``) to host RAM. Returns the bytes requested to move."""
        kept = self.resident & after
        self._has_host_room |= ~kept
        moved = sum(tensor.demote(self.resident, kept) for tensor in self.tensors)
        self.resident = kept
        return moved

    def promote(self, after: np.ndarray) -> int:
        """Move the experts that ``after`` adds to VRAM. Returns the bytes requested to move."""
        grown = self.resident | after
        moved = sum(tensor.promote(self.resident, grown) for tensor in self.tensors)
        self.resident = grown
        return moved

    def reread_residency(self) -> None:
        """After a fault, read back which experts are in VRAM. Half-moved ones count as offloaded."""
        if not self.tensors:
            return
        whole = np.ones(self.num_experts, dtype=bool)
        for tensor in self.tensors:
            whole &= tensor.resident()
        self.resident = whole

    @property
    def routed_ids(self) -> range:
        """The model's ids of the local routed experts, in local order."""
        return range(self.first_expert, self.first_expert + int((~self.always_resident).sum()))

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in managed memory."""
        return sum(tensor.layout.expert_bytes for tensor in self.tensors)

    @property
    def resident_bytes(self) -> int:
        """VRAM that managed experts take, in whole pages."""
        return sum(tensor.resident_bytes(self.resident) for tensor in self.tensors)

    @property
    def stranded_bytes(self) -> int:
        """VRAM that offloaded experts are expected to keep, on top of ``resident_bytes``, after many changes of residents."""
        return sum(tensor.layout.stranded_bytes(int(self.resident.sum())) for tensor in self.tensors)

    @property
    def offloaded_bytes(self) -> int:
        return sum(tensor.layout.nbytes for tensor in self.tensors) - self.resident_bytes

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(address == mine.address for mine in self._live_tensors())

    def _live_tensors(self) -> list[ExpertTensor]:
        """Without tensors that were already freed: a new one may have their address."""
        return [tensor for tensor in self.tensors if self.memory.holds(tensor.managed)]

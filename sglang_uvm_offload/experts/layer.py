"""The experts of one MoE layer on one rank: their tensors, and which of them are resident."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sglang_uvm_offload.experts.takeover import expert_tensors, move_into_managed
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Memory, Span
from sglang_uvm_offload.units import size

ChooseExtents = Callable[[ExpertLayout], np.ndarray]
"""A tensor's layout -> ``bool[extents]``, those to place in VRAM at load."""

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
        self,
        memory: Memory,
        layer_id: int,
        num_experts: int,
        num_shared: int,
        first_expert: int,
        choose: ChooseExtents,
        kept: np.ndarray | None = None,
    ):
        """``kept`` ``bool[num_experts]``: routed experts that are never demoted."""
        self.memory = memory
        self.layer_id = layer_id
        self.num_experts = num_experts
        self.first_expert = first_expert
        self.always_resident = np.arange(num_experts) >= num_experts - num_shared
        self.kept = self.always_resident if kept is None else self.always_resident | kept
        """``bool[num_experts]``: those that stay in VRAM."""
        self._choose = choose
        self.tensors: list[ExpertTensor] = []
        self.layouts: tuple[ExpertLayout, ...] = ()
        """Those of ``tensors``; the same object until they change."""
        self.offloaded_bytes_by_expert = np.zeros(num_experts, dtype=np.int64)
        """int64 ``[num_experts]``: the bytes of each expert that steps read from host RAM. Replaced whenever it changes."""
        self.plain_bytes = 0
        """Bytes of expert tensors left in ordinary VRAM: too small to place, or with interleaved experts."""
        self.holders: tuple[object, ...] = ()
        """What holds the tensors: the layer's module and its quantisation method."""
        self.generation = 0
        """Another number whenever tensors may have been replaced."""
        self._synced_bytes = 0
        """Bytes of all expert tensors at the last ``sync_tensors``."""

    def allocate(self, expert_bytes: int, device: torch.device, description: str) -> torch.Tensor | None:
        """``takeover.Allocate`` for this layer: managed and placed, or None if an expert is too small to place."""
        layout = ExpertLayout(self.num_experts, expert_bytes, self.memory.block_bytes)
        if device.type != self.memory.device_type or not layout.placeable:
            return None
        name = f"{description} of MoE layer {self.layer_id}"
        resident = self._initial(layout)
        check_host_ram(self.memory, "allocate", name, layout.taken_by(~resident))
        tensor = ExpertTensor(self.memory, name, layout)
        flat = tensor.bytes()
        tensor.place(resident)
        self.tensors.append(tensor)
        self._note_tensors()
        return flat

    def _initial(self, layout: ExpertLayout) -> np.ndarray:
        """``bool[extents]``: as in an equal tensor, which this one may be about to replace; else as chosen at load."""
        equal = (tensor.resident for tensor in self._live_tensors() if tensor.layout == layout)
        return next(equal, self._choose(layout) | layout.holding(self.kept))

    def sync_tensors(self, *holders: object) -> None:
        """Call it after code that may have replaced tensors of the ``holders`` (the layer's module and its quantisation
        method): takes over new tensors and drops freed ones. Raises ``ExpertsLost`` if nearly all bytes are gone."""
        self.holders = holders
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
        self._note_tensors()
        self.plain_bytes = sum(plain.values())
        before = self._synced_bytes
        self._synced_bytes = sum(tensor.layout.nbytes for tensor in self.tensors) + self.plain_bytes
        if self._synced_bytes < before / MAX_SHRINK_FACTOR:
            lost, experts = size(before - self._synced_bytes), f"the experts of MoE layer {self.layer_id}"
            raise ExpertsLost(f"after loading, {lost} of the {size(before)} of {experts} are not found in the layer")

    def _note_tensors(self) -> None:
        self.generation += 1
        layouts = tuple(tensor.layout for tensor in self.tensors)
        if layouts != self.layouts:
            self.layouts = layouts
        self._note_residency()

    def _note_residency(self) -> None:
        """Counts on the thread that moves, so that the one that launches steps need not."""
        none = np.zeros(self.num_experts, dtype=np.int64)
        self.offloaded_bytes_by_expert = sum((tensor.offloaded_bytes for tensor in self.tensors), start=none)

    # The extents of all tensors, one after the other. Arrays are ``bool[extents]``.

    def resident_extents(self) -> np.ndarray:
        """Those in VRAM."""
        return np.concatenate([np.zeros(0, dtype=bool), *(tensor.resident for tensor in self.tensors)])

    def host_bytes_to_demote(self, after: np.ndarray) -> int:
        """Host RAM that ``demote`` takes."""
        return sum(tensor.host_bytes_to_demote(part) for tensor, part in self._by_tensor(after))

    def demote(self, after: np.ndarray) -> int:
        """Move the extents that ``after`` lacks to host RAM. Returns the bytes moved."""
        try:
            return sum(tensor.demote(part) for tensor, part in self._by_tensor(after))
        finally:
            self._note_residency()

    def promote(self, after: np.ndarray) -> int:
        """Move the extents that ``after`` adds to VRAM. Returns the bytes moved."""
        try:
            return sum(tensor.promote(part) for tensor, part in self._by_tensor(after))
        finally:
            self._note_residency()

    def reread_residency(self) -> None:
        """After a fault, read back what is in VRAM. An extent that moved in part counts as offloaded."""
        for tensor in self.tensors:
            tensor.reread()
        self._note_residency()

    def _by_tensor(self, extents: np.ndarray) -> list[tuple[ExpertTensor, np.ndarray]]:
        ends = np.cumsum([0, *(layout.num_extents for layout in self.layouts)])
        if extents.shape != (ends[-1],):
            raise ValueError(f"MoE layer {self.layer_id} has {ends[-1]} extents, not {extents.shape}")
        return [(tensor, extents[a:b]) for tensor, a, b in zip(self.tensors, ends[:-1], ends[1:], strict=True)]

    # Its experts.

    @property
    def resident(self) -> np.ndarray:
        """``bool[num_experts]``: the experts that are wholly in VRAM."""
        return self.offloaded_bytes_by_expert == 0

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
        """VRAM that managed experts take, in whole blocks."""
        return sum(tensor.resident_bytes for tensor in self.tensors)

    @property
    def offloaded_bytes(self) -> int:
        """Host RAM that managed experts take."""
        return int(self.offloaded_bytes_by_expert.sum())

    def _is_managed(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(address == mine.address for mine in self._live_tensors())

    def _live_tensors(self) -> list[ExpertTensor]:
        """Without tensors that were already freed: a new one may have their address."""
        return [tensor for tensor in self.tensors if self.memory.holds(tensor.managed)]

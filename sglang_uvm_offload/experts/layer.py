"""The experts of one MoE layer on one rank: their tensors, and which of them are resident."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from sglang_uvm_offload.experts.takeover import HeldTensor, expert_tensors, move_into_managed, one_run_an_expert
from sglang_uvm_offload.experts.tensor import ExpertTensor, PlainTensor
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import ExpertLayout
from sglang_uvm_offload.memory.protocol import Location, ManagedMemoryError, Memory, Span
from sglang_uvm_offload.units import size

ChooseExtents = Callable[[ExpertLayout], np.ndarray]
"""A tensor's layout -> ``bool[extents]``, those to place in VRAM at load."""

MAX_SHRINK_FACTOR = 8
"""How far post-load processing may shrink a layer's bytes: 16 bits may become 4, with scales. If 4-bit weights moved elsewhere,
the remaining scales are a ninth."""


def check_host_ram(memory: Memory, call: str, name: str, needed: int) -> None:
    """Raise ``ManagedMemoryError`` if ``call`` needs ``needed`` bytes of host RAM and they are not free: the kernel would kill
    some process to get them."""
    if not needed:
        return
    room = _host_room(memory, needed)
    if needed > room:
        memory.wait_until_populated()  # what was written before it is populated counts twice until then
        room = _host_room(memory, needed)
    if needed > room:
        raise ManagedMemoryError(
            call,
            name,
            Span(0, needed),
            f"it takes {size(needed)} of host RAM, and {size(max(room, 0))} is left "
            f"({size(host_margin(needed))} is reserved for other uses)",
        )


def _host_room(memory: Memory, needed: int) -> int:
    return memory.info().host_available - host_margin(needed)


class ExpertsLost(RuntimeError):
    """A layer's weights are no longer in its modules, so they can be neither offloaded nor counted."""


class ExpertLayer:
    """Fused shared experts are always resident: every token uses them. Local expert 0 is the layer's place ``first_expert``."""

    def __init__(self, memory: Memory, shard: LayerShard, reserved_slots: int = 0):
        """The tensors are address space until ``place``, with room for ``reserved_slots`` rows behind the experts of each."""
        self.memory = memory
        self.shard = shard
        self.num_experts = num_experts = shard.num_experts
        self.num_slots = 0
        """Rows behind the experts of each tensor, in VRAM, for copies of any of them."""
        self._reserved_slots = reserved_slots
        self.first_expert = shard.places.start
        self.location = shard.located()
        """Replaced when SGLang rearranges experts."""
        self.always_resident = np.arange(num_experts) >= shard.routed
        self.kept = self.always_resident
        """``bool[num_experts]``: the experts that stay in VRAM."""
        self._choose: ChooseExtents | None = None
        self.tensors: list[ExpertTensor] = []
        self.layouts: tuple[ExpertLayout, ...] = ()
        """The layouts of ``tensors``; the same object until they change."""
        self.offloaded_bytes_by_expert = np.zeros(num_experts, dtype=np.int64)
        """int64 ``[num_experts]``: the bytes of each expert that steps read from host RAM. Replaced whenever it changes."""
        self.blocks_in_vram: tuple[np.ndarray, ...] = ()
        """``bool[blocks]`` of each of ``tensors``. Replaced whenever it changes."""
        self.plain_bytes = 0
        """Bytes of expert tensors left in ordinary VRAM because they are too small to place, or have interleaved experts.
        Excludes slots."""
        self.slots_missing: str | None = None
        """An expert tensor without slot rows: a kernel that reads its row ``num_experts + s`` would read something else. None
        if every tensor has them."""
        self.holders: tuple[object, ...] = ()
        """The objects that hold the tensors: the layer's module and its quantisation method."""
        self.generation = 0
        """Changes whenever tensors may have been replaced, or rewritten by post-load processing, which makes slots stale. A
        weight update that writes into the tensors without post-load processing does not change it."""
        self._plain: list[PlainTensor] = []
        self._rows: list[tuple[int, int]] = []
        self._synced_bytes = 0
        """Bytes of all expert tensors at the last ``sync_tensors``."""

    def allocate(
        self, expert_bytes: int, device: torch.device, description: str, written_later: bool = False
    ) -> torch.Tensor | None:
        """``takeover.Allocate`` for this layer: managed and placed memory. For experts too small to place, ordinary memory with
        slots, or None without slots. ``written_later``: by SGLang's loader, so that the host pages of a model that is loading
        may come later too."""
        reserved = 0 if self.placed else self._reserved_slots
        layout = ExpertLayout(self.num_experts, expert_bytes, self.memory.block_bytes, self.num_slots, reserved)
        if device.type != self.memory.device_type:
            return None
        if not layout.placeable:
            return self._allocate_plain(layout, device) if self.placed and self.num_slots and expert_bytes else None
        tensor = ExpertTensor(self.memory, f"{description} of MoE layer {self.layer_id}", layout)
        flat = tensor.bytes()
        if self.placed:
            self._place(tensor, self._initial(layout))
            if not written_later:
                self.memory.wait_until_populated(tensor.address)
        self.tensors.append(tensor)
        self._note_tensors()
        return flat

    def write(self, flat: torch.Tensor, write: Callable[[], object], zeros: bool) -> None:
        """``takeover.Write`` for this layer."""
        mine = self._of(flat)
        if isinstance(mine, ExpertTensor):
            mine.write(write, zeros)
        else:
            write()

    @property
    def layer_id(self) -> int:
        return self.shard.layer_id

    @property
    def placed(self) -> bool:
        """Whether the layer's tensors have their pages."""
        return self._choose is not None

    def place(self, choose: ChooseExtents, kept: np.ndarray | None = None, num_slots: int = 0) -> None:
        """Populate the tensors, and from here on every new one. ``choose``: which extents of a tensor begin in VRAM. ``kept``
        ``bool[num_experts]``: routed experts that are never demoted."""
        self._choose = choose
        self.kept = self.kept if kept is None else self.kept | kept
        self.num_slots = num_slots
        for tensor in self.tensors:
            tensor.use_slots(num_slots)
            self._place(tensor, self._chosen(tensor.layout))
        self.sync_tensors(*self.holders)

    def replace(self, choose: ChooseExtents) -> np.ndarray:
        """Another choice for the placed tensors, and for new ones: ``bool[extents]``, to be moved to."""
        self._choose = choose
        return np.concatenate([np.zeros(0, dtype=bool), *(self._chosen(t.layout) | t.layout.edge for t in self.tensors)])

    def _place(self, tensor: ExpertTensor, resident: np.ndarray) -> None:
        check_host_ram(self.memory, "allocate", tensor.managed.name, tensor.layout.taken_by(~resident))
        tensor.place(resident)

    def _allocate_plain(self, layout: ExpertLayout, device: torch.device) -> torch.Tensor:
        whole = torch.zeros(layout.range_bytes, dtype=torch.uint8, device=device)
        self._plain.append(PlainTensor(layout, whole))
        return whole[: layout.nbytes]

    def _initial(self, layout: ExpertLayout) -> np.ndarray:
        """``bool[extents]``: the residency of a tensor with the same layout, which this one may be about to replace; else as
        chosen at load."""
        equal = (tensor.resident for tensor in self._live_tensors() if tensor.layout == layout)
        return next(equal, self._chosen(layout))

    def _chosen(self, layout: ExpertLayout) -> np.ndarray:
        assert self._choose is not None
        return self._choose(layout) | layout.holding(self.kept)

    def sync_tensors(self, *holders: object) -> None:
        """Take over new tensors and drop freed ones. Call this after code that may have replaced tensors of the ``holders``
        (the layer's module and its quantisation method). Raises ``ExpertsLost`` if nearly all bytes are gone."""
        self.holders = holders
        rows_behind = (self.num_slots, self._reserved_slots)
        move_into_managed(holders, self.num_experts, lambda tensor: self._of(tensor) is not None, self.allocate, rows_behind)
        found = [held for held in expert_tensors(holders, self.num_experts) if held.tensor.device.type != "meta"]
        own: set[ExpertTensor | PlainTensor] = set()
        plain: dict[int, int] = {}
        for held in found:
            storage, mine = held.tensor.untyped_storage(), self._of(held.tensor)
            if mine is not None:
                own.add(mine)
            if not isinstance(mine, ExpertTensor):
                plain[storage.data_ptr()] = storage.nbytes() if mine is None else mine.layout.nbytes
        self.tensors = [tensor for tensor in self._live_tensors() if tensor in own]
        self._plain = [tensor for tensor in self._plain if tensor in own]
        self._note_tensors()
        self._note_rows(found)
        self.plain_bytes = sum(plain.values())
        before = self._synced_bytes
        self._synced_bytes = sum(tensor.layout.nbytes for tensor in self.tensors) + self.plain_bytes
        if self._synced_bytes < before / MAX_SHRINK_FACTOR:
            lost, experts = size(before - self._synced_bytes), f"the experts of MoE layer {self.layer_id}"
            raise ExpertsLost(f"after loading, {lost} of the {size(before)} of {experts} are missing from the layer")

    def _note_rows(self, found: Iterable[HeldTensor]) -> None:
        """``found``: all expert tensors."""
        rows, missing = {}, []
        for held in found:
            tensor, mine = held.tensor, self._of(held.tensor)
            if mine is not None and one_run_an_expert(tensor, mine.layout.expert_bytes):
                rows[tensor.untyped_storage().data_ptr()] = mine.layout.expert_bytes
            elif tensor.numel():
                missing.append(str(held))
        self.slots_missing = missing[0] if missing and self.num_slots else None
        self._rows = list(rows.items()) if self.num_slots and not missing else []

    def slot_rows(self) -> list[tuple[int, int]]:
        """The address of row 0 and the bytes of a row, for each storage with expert tensors, in the layer's order. Slot ``s``
        is row ``num_experts + s``. Empty without slots, or with ``slots_missing``. As of the last ``sync_tensors``."""
        return self._rows.copy()

    def _note_tensors(self) -> None:
        self.generation += 1
        layouts = tuple(tensor.layout for tensor in self.tensors)
        if layouts != self.layouts:
            self.layouts = layouts
        self._note_residency()

    def _note_residency(self) -> None:
        """Computed on the thread that moves experts, so that the thread that launches steps does not have to."""
        none = np.zeros(self.num_experts, dtype=np.int64)
        self.offloaded_bytes_by_expert = sum((tensor.offloaded_bytes for tensor in self.tensors), start=none)
        self.blocks_in_vram = tuple(tensor.layout.block_mask(tensor.resident) for tensor in self.tensors)

    # The extents of all tensors, concatenated. Arrays are ``bool[extents]``.

    def resident_extents(self) -> np.ndarray:
        """The extents in VRAM."""
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

    def place_slots(self, location: Location) -> None:
        """Move the slots, and the expert bytes that share a block with them."""
        try:
            for tensor in self.tensors:
                tensor.place_slots(location)
        finally:
            self._note_residency()

    def reread_residency(self) -> None:
        """After a fault, look which extents are in VRAM that count as offloaded: so far all that the failed call was moving
        do. Without an answer they go on to count so. Waits for reads. Raises ``ManagedMemoryError``."""
        offsets = [tensor.layout.blocks(~tensor.resident) for tensor in self.tensors]
        of_tensor = zip(self.tensors, offsets, strict=True)
        found = self.memory.in_vram([(tensor.managed, int(offset)) for tensor, each in of_tensor for offset in each])
        if found is None:
            return
        ends = np.cumsum([0, *map(len, offsets)])
        for tensor, a, b in zip(self.tensors, ends[:-1], ends[1:], strict=True):
            tensor.reread(found[a:b])
        self._note_residency()

    def _by_tensor(self, extents: np.ndarray) -> list[tuple[ExpertTensor, np.ndarray]]:
        ends = np.cumsum([0, *(layout.num_extents for layout in self.layouts)])
        if extents.shape != (ends[-1],):
            raise ValueError(f"MoE layer {self.layer_id} has {ends[-1]} extents, not {extents.shape}")
        return [(tensor, extents[a:b]) for tensor, a, b in zip(self.tensors, ends[:-1], ends[1:], strict=True)]

    # The layer's experts.

    @property
    def resident(self) -> np.ndarray:
        """``bool[num_experts]``: the experts that are wholly in VRAM."""
        return self.offloaded_bytes_by_expert == 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert in managed memory."""
        return sum(tensor.layout.expert_bytes for tensor in self.tensors)

    @property
    def resident_bytes(self) -> int:
        """VRAM that managed experts take, in whole blocks."""
        return sum(tensor.resident_bytes for tensor in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """VRAM that the slots take in addition to the experts: whole blocks of managed ranges, and rows of ordinary tensors."""
        return sum(tensor.layout.slot_bytes for tensor in self.tensors) + sum(tensor.slot_bytes for tensor in self._plain)

    @property
    def offloaded_bytes(self) -> int:
        """Host RAM that managed experts take."""
        return int(self.offloaded_bytes_by_expert.sum())

    def _of(self, tensor: torch.Tensor) -> ExpertTensor | PlainTensor | None:
        """The layer's own tensor that ``tensor`` is a view of."""
        address = tensor.untyped_storage().data_ptr()
        managed = (mine for mine in self._live_tensors() if mine.address == address)
        return next(managed, None) or next((mine for mine in self._plain if mine.holds(tensor)), None)

    def _live_tensors(self) -> list[ExpertTensor]:
        """The tensors that are not freed. A new tensor may have the address of a freed one."""
        return [tensor for tensor in self.tensors if self.memory.holds(tensor.managed)]

"""The experts of one MoE layer on one rank: their tensors, and which of them are resident."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from sglang_uvm_offload.experts.pool import ExpertPool
from sglang_uvm_offload.experts.takeover import HeldStorage, describe, expert_storages
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.host_ram import host_margin
from sglang_uvm_offload.memory.layout import ExpertLayout, experts_of_a_group
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Memory, Span
from sglang_uvm_offload.units import size

ChooseExtents = Callable[[ExpertLayout], np.ndarray]
"""A tensor's layout -> ``bool[extents]``, the extents to place in VRAM at load."""

PoolOf = Callable[[tuple[int, ...]], "ExpertPool | str"]
"""The bytes of an expert in each of a layer's tensors, ascending -> the pool of such layers, or why they have none."""

MAX_SHRINK_FACTOR = 8
"""How far post-load processing may shrink a layer's bytes: 16 bits may become 4, with scales. If 4-bit weights moved elsewhere,
the remaining scales are a ninth."""


def check_host_ram(memory: Memory, call: str, name: str, needed: int) -> None:
    """Raise ``ManagedMemoryError`` if ``call`` needs more host RAM (``needed`` bytes) than is free: the kernel would kill some
    process to get it."""
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
    """One rank's experts of a MoE layer. Fused shared experts are always resident, because every token uses them. Local expert
    0 is at the layer's place ``first_expert``."""

    def __init__(self, memory: Memory, shard: LayerShard, index: int = 0):
        """The tensors are address space until ``place``. ``index``: the layer's number among the model's MoE layers on this
        rank."""
        self.memory = memory
        self.shard = shard
        self.index = index
        self.num_experts = num_experts = shard.num_experts
        self.num_slots = 0
        """The layer's part of the shared slots; 0 if it uses none."""
        self.pool: ExpertPool | None = None
        """The pool in which all expert tensors have their homes; None if they have none."""
        self.without_pool: str | None = None
        """Why the layer cannot use the slots that it was to have; None if it can."""
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
        """Bytes of expert tensors that are always in VRAM, because their experts are too small to place, or interleave."""
        self.holders: tuple[object, ...] = ()
        """The objects that hold the tensors: the layer's module and its quantisation method."""
        self.generation = 0
        """Changes whenever tensors may have been replaced, or rewritten by post-load processing, which makes slots stale. A
        weight update that writes into the tensors without post-load processing does not change it."""
        self._pool_of: PoolOf | None = None
        self._pools: list[ExpertPool] = []
        """The pools in which the layer has, or had, homes."""
        self._small: list[ExpertTensor] = []
        """Tensors in the pool with experts too small to place."""
        self.group = 1
        """The number of experts in each group of residents; 1 if residents are chosen one by one."""
        self._synced_bytes = 0
        """Bytes of all expert tensors at the last ``sync_tensors``."""

    def allocate(
        self, expert_bytes: int, device: torch.device, description: str, written_later: bool = False
    ) -> torch.Tensor | None:
        """``takeover.Allocate`` for this layer: managed and placed memory; None for experts too small to place.
        ``written_later``: by SGLang's loader, so that the host pages of a model that is loading may come later too."""
        layout = ExpertLayout.grouped(self.num_experts, expert_bytes, self.memory.block_bytes, self.group)
        if device.type != self.memory.device_type or not layout.placeable:
            return None
        tensor = ExpertTensor.allocated(self.memory, f"{description} of MoE layer {self.layer_id}", layout)
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
        mine = self._of(flat.untyped_storage())
        if mine is None:
            write()
        else:
            mine.write(write, zeros)

    @property
    def layer_id(self) -> int:
        return self.shard.layer_id

    @property
    def placed(self) -> bool:
        """Whether the layer's tensors have their pages."""
        return self._choose is not None

    def place(
        self, choose: ChooseExtents, kept: np.ndarray | None = None, num_slots: int = 0, *, grouped: bool = False
    ) -> None:
        """Populate the tensors, and from here on every new one. ``choose``: which extents of a tensor begin in VRAM. ``kept``
        ``bool[num_experts]``: routed experts that are never demoted. ``num_slots``: the layer's part of the slots.
        ``grouped``: whether to choose residents by groups of experts that are whole blocks, where that takes no more VRAM."""
        self._choose = choose
        if grouped:
            self._group(choose)
        self.kept = self.kept if kept is None else self.kept | kept
        self.num_slots = num_slots
        if self.holders:
            self.sync_tensors(*self.holders)
        for tensor in self.tensors:
            if not tensor.placed:
                self._place(tensor, self._chosen(tensor.layout))
        self._note_residency()

    def _group(self, choose: ChooseExtents) -> None:
        alone = [tensor.layout for tensor in self.tensors]
        sizes = [layout.expert_bytes for layout in alone]
        group = experts_of_a_group(self.shard.routed, sizes, self.memory.block_bytes)
        together = [replace(layout, group=group) for layout in alone]
        if [layout.taken_by(choose(layout)) for layout in together] == [layout.taken_by(choose(layout)) for layout in alone]:
            self.group = group
            for tensor, layout in zip(self.tensors, together, strict=True):
                tensor.regroup(layout)
            self._note_tensors()

    def mark_written(self) -> None:
        """Anything may have been written to the tensors, before they are placed."""
        for tensor in self.tensors:
            tensor.written = True

    def storage_written(self, storage: torch.UntypedStorage) -> None:
        """Anything may have been written to the tensor with this storage, if there is one, before it is placed."""
        mine = self._of(storage)
        if mine is not None:
            mine.written = True

    def join_pool(self, pool_of: PoolOf) -> None:
        """Move tensors to their homes in a pool, from the next ``sync_tensors`` on."""
        self._pool_of = pool_of

    def replace(self, choose: ChooseExtents, num_slots: int) -> np.ndarray:
        """Choose again, for the placed tensors and for new ones. Returns the extents that are to be resident,
        ``bool[extents]``."""
        self._choose, self.num_slots = choose, num_slots
        return np.concatenate([np.zeros(0, dtype=bool), *(self._chosen(tensor.layout) for tensor in self.tensors)])

    def _place(self, tensor: ExpertTensor, resident: np.ndarray) -> None:
        check_host_ram(self.memory, "allocate", tensor.managed.name, tensor.layout.taken_by(~resident))
        tensor.place(resident)

    def _initial(self, layout: ExpertLayout) -> np.ndarray:
        """``bool[extents]``: the residency of a tensor with the same layout, which this one may be about to replace; else as
        chosen at load."""
        equal = (tensor.resident for tensor in self._live_tensors() if tensor.layout == layout and tensor.placed)
        return next(equal, self._chosen(layout))

    def _chosen(self, layout: ExpertLayout) -> np.ndarray:
        assert self._choose is not None
        return self._choose(layout) | layout.holding(self.kept)

    def sync_tensors(self, *holders: object) -> None:
        """Take over new tensors and drop freed ones. Call this after code that may have replaced tensors of the ``holders``
        (the layer's module and its quantisation method). Raises ``ExpertsLost`` if nearly all bytes are gone."""
        self.holders = holders
        if self.placed and self._pool_of is not None:
            self._move_into_pool()
        self._move_into_managed()
        own: list[ExpertTensor] = []
        plain_bytes = 0
        for found in self._storages():
            mine = self._of(found.storage)
            own += [mine] if mine is not None else []
            if mine is None or not mine.layout.placeable:
                plain_bytes += found.storage.nbytes()
        self.tensors = [tensor for tensor in self._live_tensors() if tensor in own]
        self._small = [tensor for tensor in self._small if tensor in own]
        self._note_tensors()
        self.plain_bytes = plain_bytes
        before = self._synced_bytes
        self._synced_bytes = sum(tensor.layout.nbytes for tensor in self.tensors) + self.plain_bytes
        if self._synced_bytes < before / MAX_SHRINK_FACTOR:
            lost, experts = size(before - self._synced_bytes), f"the experts of MoE layer {self.layer_id}"
            raise ExpertsLost(f"after loading, {lost} of the {size(before)} of {experts} are missing from the layer")

    def _storages(self) -> list[HeldStorage]:
        return expert_storages(self.holders, self.num_experts)

    def _move_into_managed(self) -> None:
        """Move tensors that other code allocated into managed memory, if they can be placed."""
        for found in self._storages():
            nbytes = found.expert_bytes(self.num_experts)
            if nbytes is None or self._of(found.storage) is not None:
                continue
            flat = self.allocate(nbytes, found.device, describe(found.held[0].tensor))
            if flat is not None:
                found.move(flat)

    def _move_into_pool(self) -> None:
        """Move each storage to its home. Unless all of them are there, the layer uses no slots."""
        self.pool, self.without_pool = None, None
        joined = self._move_home_together()
        if isinstance(joined, str):
            self.without_pool = joined
        else:
            self.pool = joined
        self._leave_all_but(self.pool)

    def _leave_all_but(self, mine: ExpertPool | None) -> None:
        for pool in self._pools:
            if pool is not mine:
                pool.leave(self.index)

    def _move_home_together(self) -> ExpertPool | str:
        """The pool that all storages are in now, or why there is none."""
        assert self._pool_of is not None
        storages = self._storages()
        sizes = [found.expert_bytes(self.num_experts) for found in storages]
        for found, nbytes in zip(storages, sizes, strict=True):
            if nbytes is None or found.device.type != self.memory.device_type:
                return f"{found.held[0]} has no rows of its own, one for each expert"
        pool = self._pool_of(tuple(sorted(nbytes for nbytes in sizes if nbytes is not None)))
        if isinstance(pool, str):
            return pool
        self._leave_all_but(pool)  # what replaced tensors had there, before others take VRAM
        if pool not in self._pools:
            self._pools.append(pool)
        for found, nbytes in zip(storages, sizes, strict=True):
            mine = self._of(found.storage)
            if mine is not None and pool.is_home(mine):
                continue
            home = pool.vacant_home(self.index, nbytes or 0)
            if home is None or not self._move_home(found, mine, home):
                return f"something keeps a tensor in the place of {found.held[0]}"
        return pool

    def _move_home(self, found: HeldStorage, mine: ExpertTensor | None, home: ExpertTensor) -> bool:
        """Move a storage home. Returns False, and leaves it, if something else refers to its tensor, because that would not
        follow."""
        flat = home.bytes()
        copy = mine is None or mine.placed or mine.written
        if copy:
            self._place_home(home, mine)
            self.memory.wait_until_populated(home.address)
        found.move(flat, copy)
        if mine is not None and self.memory.holds(mine.managed):
            gc.collect()
            if self.memory.holds(mine.managed):
                found.move(mine.bytes(), copy=False)
                return False
        self._place_home(home, mine)
        homes = self.tensors if home.layout.placeable else self._small
        if home not in homes:
            homes.append(home)
        return True

    def _place_home(self, home: ExpertTensor, mine: ExpertTensor | None) -> None:
        """Place ``home``. ``mine``: the tensor that moves there, if it is managed."""
        if not home.placed:
            self._place(home, mine.resident if mine is not None and mine.placed else self._initial(home.layout))

    def slot_rows(self) -> list[tuple[int, int]]:
        """The address of row 0 and the bytes of a row, for each storage with expert tensors. Slot ``s`` is row
        ``pool.first_slot(index) + s``. Empty without a pool. As of the last ``sync_tensors``."""
        homes = [*self.tensors, *self._small] if self.pool is not None else []
        return [(home.address, home.layout.expert_bytes) for home in homes]

    def rows_from(self, address: int) -> torch.Tensor:
        """``uint8[pool.num_rows, bytes]``: the rows of the pool's tensor that begins at ``address``, with all slots."""
        assert self.pool is not None
        return self.pool.rows_from(next(home for home in (*self.tensors, *self._small) if home.address == address))

    def _note_tensors(self) -> None:
        self.generation += 1
        layouts = tuple(tensor.layout for tensor in self.tensors)
        if layouts != self.layouts:
            self.layouts = layouts
        self._note_residency()

    def _note_residency(self) -> None:
        """Runs on the thread that moves experts, so that the thread that launches steps does not have to compute this."""
        none = np.zeros(self.num_experts, dtype=np.int64)
        self.offloaded_bytes_by_expert = sum((tensor.offloaded_bytes for tensor in self.tensors), start=none)
        self.blocks_in_vram = tuple(tensor.layout.block_mask(tensor.resident) for tensor in self.tensors)

    # The extents of all tensors, concatenated. Arrays are ``bool[extents]``.

    def resident_extents(self) -> np.ndarray:
        """The extents in VRAM."""
        return np.concatenate([np.zeros(0, dtype=bool), *(tensor.resident for tensor in self.tensors)])

    def host_bytes_to_demote(self, after: np.ndarray) -> int:
        """The bytes of host RAM that ``demote`` takes."""
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
        """After a fault, find out which offloaded extents are in VRAM: until now, all that the failed call was moving count as
        offloaded. If memory cannot tell, they still do. Waits for reads. Raises ``ManagedMemoryError``."""
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
        """The bytes of VRAM that managed experts take, in whole blocks."""
        return sum(tensor.resident_bytes for tensor in self.tensors)

    @property
    def reclaimable_bytes(self) -> int:
        """The most VRAM, in whole blocks, that the driver keeps for extents that left it."""
        return sum(tensor.reclaimable_bytes for tensor in self.tensors)

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of host RAM that managed experts take."""
        return int(self.offloaded_bytes_by_expert.sum())

    def _of(self, storage: torch.UntypedStorage) -> ExpertTensor | None:
        """The layer's own tensor with this storage; None if it has none."""
        address = storage.data_ptr()
        return next((mine for mine in self._live_tensors() + self._live_small() if mine.address == address), None)

    def _live_small(self) -> list[ExpertTensor]:
        return [tensor for tensor in self._small if self.memory.holds(tensor.managed)]

    def _live_tensors(self) -> list[ExpertTensor]:
        """The tensors that are not freed. A new tensor may have the address of a freed one."""
        return [tensor for tensor in self.tensors if self.memory.holds(tensor.managed)]

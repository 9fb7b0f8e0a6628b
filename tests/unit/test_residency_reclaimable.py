"""VRAM that the driver keeps for experts that left it: an upper bound, and of what."""

from __future__ import annotations

import numpy as np
import pytest
from builders.managers import LAYERS, Draft, E, Rank, config
from builders.refusing import RefusingMemory
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.experts.tensor import ExpertTensor
from sglang_uvm_offload.memory.layout import BLOCK_BYTES, PAGE_BYTES, ExpertLayout
from sglang_uvm_offload.memory.protocol import Location


def move_to(rank: Rank, *experts: int) -> int:
    """Makes these experts resident in every layer; what is reclaimable then, in experts of a layer."""
    rank.manager.residents.move_to(np.tile(np.isin(np.arange(E), experts), LAYERS))
    nbytes = rank.status()["reclaimable_bytes"]
    assert nbytes % (LAYERS * PAGE_BYTES) == 0
    return nbytes // (LAYERS * PAGE_BYTES)


def test_what_was_demoted_counts_until_it_is_promoted_again():
    rank = Rank(config(resident_selection="first_n"))
    assert rank.status()["reclaimable_bytes"] == 0
    assert move_to(rank, 5, 6, 7) == 3  # 0, 1, 2
    assert move_to(rank, 0, 6, 7) == 3  # 1, 2, 5
    assert move_to(rank, 0) == 5  # 1, 2, 5, 6, 7; not 3 and 4, which were never in VRAM
    assert move_to(rank, 0, 1, 2, 5, 6, 7) == 0


def test_what_may_have_arrived_before_a_promotion_failed_counts_until_it_is_known_to_be_resident():
    memory = RefusingMemory()
    rank = Rank(config(resident_selection="first_n"), memory)
    memory.refused = Location.DEVICE
    rank.manager.residents.move_to(np.tile(np.arange(E) > 4, LAYERS))
    assert rank.manager.fault is not None
    assert rank.status()["reclaimable_bytes"] == 6 * PAGE_BYTES  # the first layer's old residents, and its new ones


def test_drafts_count_too():
    rank = Rank(config(resident_selection="first_n", draft_num_resident=2))
    draft = Draft(rank)
    draft.layer.demote(np.zeros(E, dtype=bool))
    assert rank.status()["reclaimable_bytes"] == 2 * PAGE_BYTES


def test_what_the_gpu_wrote_before_it_was_placed_in_host_ram_may_hold_vram():
    memory, layout = EmulatedMemory(), ExpertLayout(E, PAGE_BYTES, PAGE_BYTES)
    for written in (False, True):
        tensor = ExpertTensor.allocated(memory, "w13", layout)
        tensor.written = written
        tensor.place(np.zeros(E, dtype=bool))
        assert tensor.reclaimable_bytes == written * E * PAGE_BYTES


def kept(memory: SimulatedDriver) -> int:
    """VRAM that the simulated driver keeps for pages that are in host RAM."""
    return memory.device_used - memory._plain - memory.device_resident


@pytest.mark.parametrize("expert_bytes", [BLOCK_BYTES, 3 << 20])
def test_a_driver_keeps_as_much_while_nothing_needs_it_and_then_less(expert_bytes):
    seconds = iter(range(10**9))
    memory = SimulatedDriver(device_bytes=1 << 40, block_bytes=BLOCK_BYTES)
    cfg = config(num_resident=4, resident_selection="first_n", adapt="continuous")
    rank = Rank(cfg, memory, expert_bytes=expert_bytes, clock=lambda: float(next(seconds)))
    rng = np.random.default_rng(0)
    for _ in range(6):
        hot = {layer: [rng.choice(E, 3, replace=False).tolist()] for layer in range(LAYERS)}
        for _ in range(12):
            rank.step(hot)
        assert rank.manager.reclaimable_bytes == kept(memory)
    assert rank.manager.reclaimable_bytes > 4 * BLOCK_BYTES
    memory.device_bytes = memory.device_used
    memory.allocate_plain(3 * BLOCK_BYTES, "workspace")
    assert memory.traffic.evicted_bytes == 0
    assert rank.manager.reclaimable_bytes == kept(memory) + 3 * BLOCK_BYTES, "nothing tells"

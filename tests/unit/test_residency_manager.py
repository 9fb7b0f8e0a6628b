"""The manager: who is resident at load and after warm-up, alike on every rank, and what it reports."""

import logging

import pytest
import torch
from builders.managers import LAYERS, E, Rank, config, profile_of
from builders.refusing import RefusingMemory
from simulated_driver import SimulatedDriver

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.host_ram import HOST_MARGIN_BYTES
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import Location, MemoryInfo
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.residency.status import rank_status, residency_table
from sglang_uvm_offload.routing.counts import IdFormat, Phase


def test_first_n_is_resident_at_load_and_never_changes():
    rank = Rank(config(resident_selection="first_n", warmup_tokens=300))
    for _ in range(5):
        rank.step([[5, 6, 7]] * 100)
    assert rank.resident() == [[0, 1, 2]] * LAYERS


def test_manual_ids_are_split_over_expert_parallel_ranks():
    ranks = [Rank(config(resident_selection="manual", resident_ids="1,4,6"), ep_rank=r, ep_size=2) for r in range(2)]
    assert ranks[0].resident() == [[1]] * LAYERS
    assert ranks[1].resident() == [[0, 2]] * LAYERS


@pytest.mark.parametrize("n", [0, 1, 7, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_expert_parallel_ranks_share_n_exactly_and_evenly(n, size):
    shares = [LayerShard(0, 8 // size, 0, rank, size).share_of(n) for rank in range(size)]
    assert sum(shares) == n
    assert max(shares) - min(shares) <= 1


def test_hit_rates_before_and_after_the_warm_up_are_told_apart():
    rank = Rank(config(warmup_tokens=40))
    for _ in range(5):
        rank.step([[7, 5, 0]] * 8)
    early = rank.status()
    rank.step([[7, 5, 3]] * 8)  # chooses 0, 5 and 7 first, which serve two of these three
    late = rank.status()
    assert (early["hit_rate_before"], early["hit_rate_since"]) == (None, None)
    assert late["hit_rate_before"] == pytest.approx(1 / 3)
    assert late["hit_rate_since"] == pytest.approx(2 / 3)


def test_after_warmup_the_hot_experts_of_each_layer_are_resident(caplog):
    rank = Rank(config(warmup_tokens=40))
    hot = {0: [[7, 5, 3]] * 4, 1: [[0, 6, 4]] * 4, 2: [[1, 2, 7]] * 4}
    with caplog.at_level(logging.INFO):
        for step in range(11):
            assert rank.manager.residents.warm == (step > 10)
            rank.step(hot)
    assert rank.resident() == [[3, 5, 7], [0, 4, 6], [1, 2, 7]]
    (line,) = [r.getMessage() for r in caplog.records if "residents chosen" in r.getMessage()]
    assert "0.4 MiB of 0.6 MiB of residents changed in 3 layers" in line
    assert "hit rate of these 33.3 % before, 100.0 % after" in line
    for layer in rank.model.layers:
        for tensor in layer.tensors:
            there = rank.manager.memory.in_vram([(tensor.managed, at) for at in range(0, tensor.layout.nbytes, PAGE_BYTES)])
            assert (there == tensor.layout.block_mask(tensor.resident)).all()


def judged(rank, hot, caplog):
    """The line that says what live traffic showed, after a warm-up in which ``hot`` is used."""
    with caplog.at_level(logging.INFO):
        for _ in range(11):
            rank.step(hot)
    (line,) = [r.getMessage() for r in caplog.records if "live tokens" in r.getMessage()]
    return line


class TestProfile:
    HOT = ((7, 5, 3), (0, 6, 4), (1, 2, 7))

    def test_expert_parallel_ranks_take_their_own_experts_from_it(self):
        ranks = [Rank(config(num_resident=2, profile="p"), profile=profile_of(self.HOT), ep_rank=r, ep_size=2) for r in (0, 1)]
        assert [rank.resident()[0] for rank in ranks] == [[3], [1]]  # of 3 | 5, 7: the lower of equals

    def test_it_is_kept_where_live_traffic_agrees(self, caplog):
        rank = Rank(config(profile="p", warmup_tokens=40), profile=profile_of(self.HOT))
        line = judged(rank, {layer: [ids] * 4 for layer, ids in enumerate(self.HOT)}, caplog)
        assert line.endswith(
            "profile p: hit rate 100.0 % over the first 40 live tokens; the best residents for these tokens would reach "
            "100.0 %: residents kept"
        )
        assert rank.status()["profile"] == {"hit_rate": 1.0, "best": 1.0, "tokens": 40, "kept": True}
        assert rank.manager.ledger.moves == 0

    def test_a_small_lead_of_the_live_set_moves_nothing(self, caplog):
        rank = Rank(config(profile="p", warmup_tokens=40), profile=profile_of(self.HOT))
        hot = {layer: [ids] * 4 for layer, ids in enumerate(self.HOT)}
        for _ in range(5):
            rank.step({**hot, 1: [[0, 6, 1]] * 4})  # 1 instead of 4 in five steps of nine
        with caplog.at_level(logging.INFO):
            for _ in range(6):
                rank.step(hot if rank.manager.steps < 9 else {**hot, 1: [[0, 6, 1]] * 4})
        verdict = rank.status()["profile"]
        assert 0 < verdict["best"] - verdict["hit_rate"] < 0.05
        assert verdict["kept"]
        assert rank.manager.ledger.moves == 0

    def test_it_is_not_trusted_where_live_traffic_disagrees(self, caplog):
        rank = Rank(config(profile="p", warmup_tokens=40), profile=profile_of(self.HOT))
        line = judged(rank, [[0, 1, 4]] * 4, caplog)
        assert "33.3 %" in line
        assert "100.0 %" in line
        assert rank.resident() == [[0, 1, 4]] * LAYERS
        assert rank.status()["profile"]["kept"] is False

    def test_it_stays_whatever_comes_where_adaptation_is_off(self, caplog):
        rank = Rank(config(profile="p", warmup_tokens=40, adapt="off"), profile=profile_of(self.HOT))
        assert "33.3 %" in judged(rank, [[0, 1, 4]] * 4, caplog)
        assert rank.resident() == [sorted(ids) for ids in self.HOT]


def test_padding_and_dummy_steps_neither_count_nor_warm_up():
    rank = Rank(config(warmup_tokens=4))
    for _ in range(10):
        rank.manager.begin_step(rank.model, 0, 0, Phase.DECODE)
        rank.model.counters.count(0, torch.full((64, 2), 7), 0, IdFormat.PLAIN)
        rank.model.counters.count_histogram(0, torch.ones(E, dtype=torch.int32))
        rank.manager.end_step(rank.model)
        rank.model.counters.count(0, torch.full((64, 2), 7), 0, IdFormat.PLAIN)
    assert rank.manager.tokens == 0
    assert rank_status(rank.manager).routed == 0


def test_expert_parallel_ranks_choose_among_their_own_experts():
    rank = Rank(config(num_resident=4, warmup_tokens=2), ep_rank=1, ep_size=2)
    assert rank.resident() == [[0, 1]] * LAYERS
    rank.step([[2, -1], [3, -1]])
    rank.step([[-1, -1]])
    assert rank.resident() == [[2, 3]] * LAYERS
    assert rank_status(rank.manager).resident_ids == [[6, 7]] * LAYERS


def test_fused_shared_experts_stay_beside_n():
    rank = Rank(config(warmup_tokens=2), num_shared=1)
    assert rank.resident() == [[0, 1, 2, 8]] * LAYERS
    rank.step([[5, 8], [6, 8]])
    rank.step([[7, 8]])
    assert rank.resident() == [[0, 5, 6, 8]] * LAYERS


def test_n_of_all_experts_and_n_of_none_are_served():
    for n, expected in ((E, list(range(E))), (0, [])):
        rank = Rank(config(num_resident=n, warmup_tokens=1))
        rank.step([[1, 2]])
        rank.step([[1, 2]])
        assert rank.resident() == [expected] * LAYERS


@pytest.mark.parametrize("ends", [False, True])
def test_a_failed_move_serves_on_and_says_so_unless_a_kernel_failed(caplog, ends):
    memory = RefusingMemory()
    rank = Rank(config(warmup_tokens=2), memory)
    memory.refused, memory.ends_process = Location.DEVICE, ends
    rank.step([[7, 6, 5]] * 2)
    rank.step([[7, 6, 5]])
    rank.step([[7, 6, 5]])
    assert "injected" in rank_status(rank.manager).fault
    assert [r.levelname for r in caplog.records if "moving experts stopped" in r.getMessage()] == ["ERROR"]
    assert ("Serving goes on" in caplog.text) == (not ends)
    assert ("SGLang will exit" in caplog.text) == ends
    assert rank.resident() == [[], [0, 1, 2], [0, 1, 2]], "what was demoted before the fault is known to be offloaded"


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
def test_what_host_ram_has_no_room_for_is_not_demoted_and_serving_goes_on(adapt):
    class Filling(SimulatedDriver):
        room = 1 << 40

        def info(self):
            return MemoryInfo(0, 0, HOST_MARGIN_BYTES + self.room)

    memory = Filling()
    rank = Rank(config(warmup_tokens=2, adapt=adapt), memory)
    memory.room, loaded = 3 * PAGE_BYTES - 1, rank.resident()
    for _ in range(40):
        rank.step([[7, 6, 5]] * 2)
    assert "of host RAM, and" in rank_status(rank.manager).fault
    assert rank.resident() == loaded
    assert memory.traffic.to_host_bytes == memory.traffic.to_device_bytes == 0


def test_experts_that_are_in_vram_in_part_are_counted_apart():
    """Blocks of two experts: 3 residents take two blocks, so there is room for the fourth expert too."""
    rank = Rank(config(warmup_tokens=2), EmulatedMemory(2 * PAGE_BYTES), expert_bytes=3 * PAGE_BYTES)
    assert rank.resident() == [[0, 1, 2]] * LAYERS
    status = rank_status(rank.manager)
    assert (status.resident_experts, status.partly_resident_experts, status.offloaded_experts) == (9, 3, 12)
    assert status.partly_resident_ids == [[3]] * LAYERS
    assert status.resident_bytes == LAYERS * 10 * PAGE_BYTES
    table = residency_table(status, rank.manager.memory.info(), kv_tokens=1)
    assert [line.split()[-1] for line in table.splitlines() if "in both, by blocks" in line] == ["3"]
    rank.step([[3, 3, 3]])
    assert rank_status(rank.manager).hit_rate == pytest.approx(1 / 3)
    assert rank_status(rank.manager).zero_copy_bytes == LAYERS * 2 * PAGE_BYTES
    assert rank_status(rank.manager).byte_hit_rate == pytest.approx(1 / 3)


def dense(cfg):
    """The manager of a pipeline stage without MoE layers, and its model, which is placed."""
    manager = OffloadManager(cfg, EmulatedMemory(), CpuRoutingCounters, lambda decide: decide(), progress=lambda: False)
    model = manager.begin_model(draft=False)
    manager.place_model(model, InitialPlacement(cfg, None))
    return manager, model


@pytest.mark.parametrize("adapt", ["warmup", "continuous"])
def test_a_pipeline_stage_without_moe_layers_serves(adapt):
    manager, model = dense(config(warmup_tokens=1, adapt=adapt))
    manager.finish_model(model, may_be_empty=True)
    for _ in range(3):
        manager.begin_step(model, 1, 1, Phase.DECODE)
        manager.end_step(model)
    assert manager.residents.warm
    assert (rank_status(manager).num_layers, manager.fault) == (0, None)


def test_a_model_without_anything_to_offload_is_refused():
    manager, model = dense(config())
    with pytest.raises(FlagError, match="the model has no MoE layer"):
        manager.finish_model(model)

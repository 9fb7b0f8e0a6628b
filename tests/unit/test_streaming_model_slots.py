"""The slots of a model over emulated memory: what a step computes from them, when they are stale, and what is accounted for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, Rank, config

from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.slots import MAX_EXPERTS, MAX_TENSORS
from sglang_uvm_offload.policy.slot_policy import AGES, CLASSES, TAIL, WHOLE
from sglang_uvm_offload.routing.counts import ALL_ROWS, IdFormat, Phase
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer

E, SLOTS = 8, 3
BLOCK = 16


class Served(Rank):
    """A rank whose layers have slots. First three experts are resident."""

    def __init__(self, **more):
        super().__init__(config(resident_selection="first_n", slots=SLOTS), **more)
        for index, module in enumerate(self.modules):
            values = np.random.default_rng(index).integers(0, 256, tuple(module.w13.shape), dtype=np.uint8)
            module.w13.copy_(torch.from_numpy(values))
        self.device: CpuSlots
        self.slots = ModelSlots(self.model.layers, self._make)

    def _make(self, layers):
        self.device = CpuSlots(self.model.counters, layers)
        return self.device

    def serve(self, experts, phase=Phase.DECODE, valid=ALL_ROWS, padding=(), ends=(1,)):
        """A step whose only token uses ``experts``; behind it a row of padding. Returns the rows that each layer computes."""
        ids = torch.tensor([experts, *([padding] if padding else [])])
        self.manager.begin_step(self.model, valid, 1, phase)
        self.slots.begin_step(valid, phase, ends)
        rows = []
        for index, module in enumerate(self.modules):
            self.model.counters.count(index, ids, 0, IdFormat.PLAIN)
            used = torch.unique(ids)
            blocks = torch.cat([used, torch.tensor([9999])]).int()
            slots = self.slots.at(module.w13.data_ptr())
            if slots is not None:
                slots.resolve(ids, blocks, torch.tensor([len(used) * BLOCK], dtype=torch.int32), BLOCK)
            assert blocks[-1] == 9999
            rows.append(dict(zip(used.tolist(), blocks.tolist(), strict=False)))
        self.manager.end_step(self.model)
        return rows

    def stream(self, tokens, copies, ends):
        """A prefill of ``tokens``, each with its experts, that computes from ``copies`` of the layers."""
        self.manager.begin_step(self.model, len(tokens), len(tokens), Phase.PREFILL, streams=True)
        self.slots.begin_step(len(tokens), Phase.PREFILL, ends)
        for index, (module, copy) in enumerate(zip(self.modules, copies, strict=True)):
            ids = torch.tensor(tokens)
            self.model.counters.count(index, ids, 0, IdFormat.PLAIN, in_place=False)
            self.slots.keep(index, ids, {module.w13.data_ptr(): copy.data_ptr()})
        self.manager.end_step(self.model)

    def holds(self, rows):
        """Whether each row holds its expert's bytes."""
        whole = [module.w13.as_strided((E + SLOTS, PAGE_BYTES), (PAGE_BYTES, 1)) for module in self.modules]
        return all(
            torch.equal(table[row], table[e]) for table, layer in zip(whole, rows, strict=True) for e, row in layer.items()
        )


def test_a_miss_is_computed_from_the_slot_that_it_fills_and_a_resident_from_its_own_row():
    rank = Served()
    rows = rank.serve([1, 5, 7])
    assert rows == [{1: 1, 5: E, 7: E + 1}] * LAYERS
    assert rank.holds(rows)
    assert rank.serve([5, 6]) == [{5: E, 6: E + 2}] * LAYERS


def test_a_prefill_reads_what_is_in_slots_and_fills_others_with_what_its_requests_end_with():
    rank = Served()
    assert rank.serve([5], Phase.PREFILL, ends=()) == [{5: 5}] * LAYERS, "no request ends here"
    rank.serve([5])
    rows = rank.serve([1, 5, 6], Phase.PREFILL)
    assert rows == [{1: 1, 5: E, 6: E + 1}] * LAYERS
    assert rank.holds(rows)
    assert rank.serve([6, 7], Phase.PREFILL, valid=1, ends=(1, 2), padding=(3, 4))[0] == {6: E + 1, 7: E + 2, 3: 3, 4: 4}


def test_a_prefill_that_streams_leaves_its_last_experts_in_slots():
    """From the copies that it computes from, whatever is in the experts' own rows by then. What a request used too long before
    its end is left out."""
    rank = Served()
    copies = [module.w13.clone() for module in rank.modules]
    rank.serve([4])
    for module in rank.modules:
        module.w13.fill_(7)
    rank.stream([[3, 1], *[[1, 2]] * TAIL, [5, 0], [6, 1]], copies, [TAIL + 2, TAIL + 3])
    rows = rank.serve([1, 3, 4, 5, 6], Phase.PREFILL, ends=())
    assert rows == [{1: 1, 3: 3, 4: E, 5: E + 1, 6: E + 2}] * LAYERS
    for module, copy in zip(rank.modules, copies, strict=True):
        table = module.w13.as_strided((E + SLOTS, PAGE_BYTES), (PAGE_BYTES, 1))
        assert torch.equal(table[E + 1 :], copy.view(E, PAGE_BYTES)[5:7])
    slots = rank.status()["slots"]
    assert (slots["kept"], slots["fills"], slots["filled_bytes"]) == (2 * LAYERS, LAYERS, LAYERS * PAGE_BYTES)


def test_a_prefill_that_streams_evicts_what_is_worth_less_and_reads_no_slot():
    rank = Served()
    copies = [module.w13.clone() for module in rank.modules]
    for expert in (4, 5, 6):
        rank.serve([expert])
    policy = rank.device.policy
    policy.events[:], policy.uses[:] = 16 * AGES, np.repeat(range(AGES, 0, -1), CLASSES // AGES)  # what is recent is used
    rank.stream([[4, 4], [7, 7]], copies, [2])
    assert policy.owner[0].tolist() == [4, 7, 6], "4 was just used again"
    assert rank.status()["slots"]["hits"] == 0


def test_a_prefill_that_streams_brings_over_the_link_what_no_slot_holds():
    rank = Served()
    rank.serve([4])
    layer = rank.model.layers[0]
    copied, told = [], []
    staging = CpuStaging(rank.manager.memory, buffer_bytes(layer), 2)
    staging.copy = lambda buffer, parts, slots, in_vram: copied.append(slots)
    streamer = Streamer(rank.model.layers, staging, 1, lambda row, nbytes: told.append(row))
    streamer.slot_of = rank.slots.slot_of
    streamer.begin_step()
    assert copied[0].tolist() == [0] * 4 + [1] + [0] * 3
    assert told == []
    rank.stream([[4], [6]], [module.w13.clone() for module in rank.modules], [2])
    rank.stream([[4], [6]], [module.w13.clone() for module in rank.modules], [2])
    assert rank.status()["streamed_bytes"] == (4 + 3) * LAYERS * PAGE_BYTES, "of five that are offloaded"


def test_padding_is_computed_from_slots_and_fills_none_and_a_run_outside_of_a_step_does_neither():
    rank = Served()
    rank.serve([5])
    assert rank.serve([5, 6], valid=0) == [{5: 5, 6: 6}] * LAYERS
    assert rank.device.policy.now == 1
    assert rank.serve([6], valid=1, padding=(5,)) == [{5: E, 6: E + 1}] * LAYERS
    assert rank.serve([6], valid=1, padding=(7,)) == [{6: E + 1, 7: 7}] * LAYERS
    assert rank.device.policy.last[0, 7] == 0


def test_weights_that_were_written_are_not_read_from_old_copies():
    rank = Served()
    rank.serve([5, 6])
    for module in rank.modules:
        module.w13.fill_(7)
    rank.slots.bytes_written()
    rows = rank.serve([1, 5])
    assert rows == [{1: 1, 5: E}] * LAYERS, "the slot was filled anew"
    assert rank.holds(rows)
    assert rank.slots.at(rank.modules[0].w13.data_ptr()) is not None
    assert rank.serve([5]) == [{5: E}] * LAYERS
    assert rank.status()["slots"]["fills"] == 3 * LAYERS, "they are emptied once"


def test_processing_a_layers_weights_makes_its_slots_stale():
    rank = Served()
    rank.serve([5])
    rank.model.layers[1].sync_tensors(rank.modules[1])
    assert rank.serve([5], Phase.PREFILL, ends=()) == [{5: 5}] * LAYERS
    assert (rank.device.policy.slot_of == -1).all()


def test_a_layer_whose_tensors_were_replaced_uses_its_slots_no_more_nor_does_it_stream_through_them(caplog):
    rank, filled = Served(), []
    rank.serve([5])
    layer, module = rank.model.layers[1], rank.modules[1]
    copies = [each.w13.clone() for each in rank.modules]
    with caplog.at_level(logging.WARNING):
        kept = module.w13  # so that the new one gets another address
        module.w13 = kept.clone()
        layer.sync_tensors(module)
        assert rank.serve([5, 6]) == [{5: E, 6: E + 1}, {5: 5, 6: 6}, {5: E, 6: E + 1}]
    assert caplog.text.count("MoE layer 2 uses its slots no more: its tensors were replaced") == 1
    assert rank.device._share[1].tolist() == [0] * E
    assert rank.slots.at(kept.data_ptr()) is None
    assert [rank.slots.slot_of(index) is None for index in range(LAYERS)] == [False, True, False]
    rank.device.keep = lambda index, ids, addresses: filled.append(index)
    rank.stream([[5, 6]], copies, [1])
    assert filled == [0, 2]


def test_a_layer_that_loses_a_row_of_slots_uses_them_no_more(caplog):
    rank = Served()
    rank.modules[2].bias = torch.ones(1).expand(E)
    rank.model.layers[2].sync_tensors(rank.modules[2])
    with caplog.at_level(logging.WARNING):
        assert rank.serve([5]) == [{5: E}, {5: E}, {5: 5}]
    assert "MoE layer 3 uses its slots no more: bias (float32[8]) has no rows for them" in caplog.text


def test_what_is_resident_now_gets_no_slot_and_what_was_demoted_gets_one():
    rank = Served()
    rank.serve([5, 6])
    assert rank.device._share[0].tolist() == [0] * 3 + [WHOLE] * 5
    rank.manager.ledger.catch_up()
    for layer in rank.model.layers:
        wanted = np.isin(np.arange(E), [5, 6, 7])
        layer.demote(wanted)
        layer.promote(wanted)
    rank.manager.ledger.catch_up()
    assert rank.serve([0, 5]) == [{0: E + 2, 5: E}] * LAYERS, "what a slot holds is served from there"
    assert rank.device._share[0].tolist() == [WHOLE] * 5 + [0] * 3
    assert rank.serve([1]) == [{1: E + 1}] * LAYERS, "a resident's copy goes first, of two the older"
    assert rank.serve([2]) == [{2: E}] * LAYERS
    slots = rank.status()["slots"]
    assert (slots["hits"], slots["fills"]) == (0, 5 * LAYERS), "what a slot serves of a resident saves nothing"


def test_activations_and_bytes_are_accounted_for_by_what_served_them():
    rank = Served()
    rank.serve([1, 5])
    rank.serve([5, 6])
    rank.serve([5], Phase.PREFILL)
    rank.serve([4, 5, 6, 7])  # more than there are slots
    status = rank.status()
    slots, ledger = status["slots"], rank.manager.ledger
    assert (slots["hits"], slots["fills"], slots["bypasses"]) == (4 * LAYERS, 3 * LAYERS, 1 * LAYERS)
    assert slots["hits"] + slots["fills"] + slots["bypasses"] == 8 * LAYERS
    assert slots["filled_bytes"] == 3 * LAYERS * PAGE_BYTES
    assert status["zero_copy_bytes"] == LAYERS * PAGE_BYTES
    assert status["hit_rate"] == pytest.approx(5 / 9)
    assert status["byte_hit_rate"] == pytest.approx(5 / 9)
    assert ledger.activations_resident.tolist() == [4] * LAYERS, "in decode"
    assert status["history"]["filled_bytes"][-1] == slots["filled_bytes"]


def test_an_expert_that_is_offloaded_in_part_is_worth_that_part():
    rank = Served(expert_bytes=PAGE_BYTES * 3 // 2)  # three residents fill the first half of the fourth one's blocks
    rank.serve([1])
    assert rank.device._share[0].tolist() == [0, 0, 0, 11, WHOLE, WHOLE, WHOLE, WHOLE]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "num_slots", 0), "none were asked for"),
        (lambda layer: setattr(layer, "tensors", []), "none of its experts is large enough"),
        (lambda layer: setattr(layer, "num_slots", MAX_EXPERTS + 1), f"{MAX_EXPERTS + 1} slots, and at most {MAX_EXPERTS}"),
        (lambda layer: setattr(layer, "_rows", [(0, 1)] * (MAX_TENSORS + 1)), f"are in {MAX_TENSORS + 1} tensors"),
    ],
)
def test_a_layer_that_can_have_none_says_why(change, reason):
    rank = Rank(config(slots=SLOTS))
    change(rank.model.layers[1])
    made = []
    slots = ModelSlots(rank.model.layers, lambda layers: made.append(layers) or CpuSlots(rank.model.counters, layers))
    assert slots.any
    assert [layer is None for layer in made[0]] == [False, True, False]
    assert reason in slots.reasons[1]


def test_a_layer_that_is_computed_by_other_code_has_none():
    rank = Rank(config(slots=SLOTS))
    slots = ModelSlots(rank.model.layers, pytest.fail, without=lambda layer: "its runner does not")
    assert not slots.any
    assert slots.reasons == ["its runner does not"] * LAYERS
    slots.begin_step(1, Phase.DECODE)

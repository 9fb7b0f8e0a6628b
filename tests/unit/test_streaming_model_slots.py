"""The slots of a model over emulated memory: what a step computes from them, when they are stale, and what is accounted for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from builders.managers import LAYERS, E, Rank, config

from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.slots import MAX_EXPERTS, MAX_POOL_EXPERTS, MAX_TENSORS, BlockLists, Guess
from sglang_uvm_offload.policy.slot_policy import EMPTY, WHOLE
from sglang_uvm_offload.routing.counts import ALL_ROWS, IdFormat, Phase
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.streamer import Streamer

SLOTS, ROOM = 3, 6
"""Slots a layer: too few to stream one, and, since all layers share them, enough."""
BLOCK = 16
OWN = EMPTY
"""Where an expert that no slot holds is computed from: its own row."""


class Served(Rank):
    """A rank whose layers have slots. First three experts are resident."""

    def __init__(self, slots=SLOTS, **more):
        super().__init__(config(resident_selection="first_n", slots=slots), **more)
        for index in range(LAYERS):
            self.write(
                index, np.random.default_rng(index).integers(0, 256, tuple(self.modules[index].w13.shape), dtype=np.uint8)
            )
        self.device: CpuSlots
        self.slots = ModelSlots(self.model.layers, self._make)
        self.streamer = Streamer(self.model.layers, None, self.slots, 1, self.manager.ledger.add_streamed)

    def _make(self, *layers_and_slots):
        self.device = CpuSlots(self.model.counters, *layers_and_slots)
        return self.device

    def write(self, index, values):
        self.modules[index].w13.numpy()[:] = values

    def serve(self, experts, phase=Phase.DECODE, valid=ALL_ROWS, padding=(), requests=((0, 1),)):
        """A step whose only token uses ``experts``; behind it a row of padding. Returns the slot that each layer computes each
        of them from."""
        return self.forward([experts, *([padding] if padding else [])], phase, valid, requests)

    def stream(self, tokens, requests=()):
        """A prefill of ``tokens``, each with its experts, that streams."""
        return self.forward(tokens, Phase.PREFILL, ALL_ROWS, requests, streams=True)

    def forward(self, tokens, phase, valid, requests, streams=False):
        ids = torch.tensor(tokens)
        self.manager.begin_step(self.model, valid, len(tokens), phase, streams=streams)
        self.slots.begin_step(valid, phase, requests, streams=streams)
        if streams:
            self.streamer.begin_step()
        seen = []
        for index, module in enumerate(self.modules):
            reading = self.streamer.enter(index)
            self.model.counters.count(index, ids, 0, IdFormat.PLAIN, in_place=reading is None)
            used = torch.unique(ids)
            blocks = torch.cat([used, torch.tensor([9999])]).int()
            slots = self.slots.at(module.w13.data_ptr())
            if slots is not None:
                slots.resolve(ids, BlockLists(blocks, torch.tensor([len(used) * BLOCK], dtype=torch.int32), BLOCK))
            assert blocks[-1] == 9999
            rows = dict(zip(used.tolist(), blocks.tolist(), strict=False))
            first = None if slots is None else slots.first_slot
            seen.append({expert: OWN if row == expert else row - first for expert, row in rows.items()})
            table = module.w13 if slots is None else slots.all_rows(module.w13)
            assert all(torch.equal(table[row], module.w13[expert]) for expert, row in rows.items())
        if streams:
            self.streamer.end_step()
        self.manager.end_step(self.model)
        return seen

    def held(self):
        return [np.flatnonzero(slots != EMPTY).tolist() for slots in self.device.policy.slot_of]


def test_a_miss_is_computed_from_the_slot_that_it_fills_and_a_resident_from_its_own_row():
    rank = Served()
    assert rank.serve([1, 5, 7]) == [{1: OWN, 5: 2 * layer, 7: 2 * layer + 1} for layer in range(LAYERS)]
    assert rank.serve([5, 6]) == [{5: 2 * layer, 6: 6 + layer} for layer in range(LAYERS)], "layers share the slots"


def test_a_prefill_reads_what_is_in_slots_and_fills_others_with_what_its_requests_end_with():
    rank = Served()
    assert rank.serve([5], Phase.PREFILL, requests=()) == [{5: OWN}] * LAYERS, "no request ends here"
    rank.serve([5])
    assert rank.serve([1, 5, 6], Phase.PREFILL) == [{1: OWN, 5: layer, 6: 3 + layer} for layer in range(LAYERS)]
    padded = rank.serve([6, 7], Phase.PREFILL, valid=1, requests=((0, 1), (1, 2)), padding=(3, 4))
    assert padded == [{6: 3 + layer, 7: 6 + layer, 3: OWN, 4: OWN} for layer in range(LAYERS)]


@pytest.mark.parametrize(("slots", "room"), [(ROOM - 1, False), (ROOM, True)])
def test_a_pool_has_room_for_streams_where_it_holds_the_experts_of_two_layers(slots, room):
    rank = Served(slots)
    assert [rank.slots.has_room(index) for index in range(LAYERS)] == [room] * LAYERS
    assert [rank.slots.brings(index) for index in range(LAYERS)] == [room] * LAYERS
    layer = rank.model.layers[1]
    layer.promote(np.ones(len(layer.resident_extents()), dtype=bool))
    assert [rank.slots.brings(index) for index in range(LAYERS)] == [room, False, room]
    assert rank.slots.has_room(1) == room, "residents may change"


def test_a_step_that_streams_brings_each_offloaded_expert_once_and_the_next_ones_hit():
    rank = Served(ROOM)
    rank.serve([4])
    seen = rank.stream([[1, 5], [6, 7]])
    assert [[layer[expert] == OWN for expert in (1, 5, 6, 7)] for layer in seen] == [[True] + [False] * 3] * LAYERS
    assert rank.held() == [[3, 4, 5, 6, 7]] * LAYERS
    rank.stream([[3, 4]])
    status = rank.status()
    served = [(layer["routed"], layer["routed_resident"]) for layer in status["layers"]]
    assert served == [(1 + 4 + 2, 1 + 2)] * LAYERS, "a resident, and what slots held before the step"
    assert status["slots"]["brought"] == 4 * LAYERS, "4 was there"
    assert status["streamed_bytes"] == 4 * LAYERS * PAGE_BYTES
    assert rank.manager.ledger.streamed_bytes.tolist() == [4 * PAGE_BYTES] * LAYERS
    assert (status["zero_copy_bytes"], status["slots"]["hits"], status["slots"]["fills"]) == (0, 0, LAYERS)
    rank.serve([3, 7])
    slots = rank.status()["slots"]
    assert (slots["hits"], slots["fills"], slots["filled_bytes"]) == (2 * LAYERS, LAYERS, LAYERS * PAGE_BYTES)


def test_a_step_that_streams_fills_slots_with_its_last_experts_where_these_are_too_few_for_a_stream():
    rank = Served()
    assert rank.stream([[3, 4], [5, 6]]) == [dict.fromkeys([3, 4, 5, 6], OWN)] * LAYERS
    assert rank.stream([[1, 5]], [(0, 1)]) == [{1: OWN, 5: layer} for layer in range(LAYERS)]
    assert rank.status()["slots"]["fills"] == LAYERS
    assert rank.status()["streamed_bytes"] == 0


def test_padding_is_computed_from_slots_and_fills_none_and_a_run_outside_of_a_step_does_neither():
    rank = Served()
    rank.serve([5])
    assert rank.serve([5, 6], valid=0) == [{5: OWN, 6: OWN}] * LAYERS
    assert rank.device.policy.now == 1
    assert rank.serve([6], valid=1, padding=(5,)) == [{5: layer, 6: 3 + layer} for layer in range(LAYERS)]
    assert rank.serve([6], valid=1, padding=(7,)) == [{6: 3 + layer, 7: OWN} for layer in range(LAYERS)]
    assert rank.device.policy.last[0, 7] == 0


def test_weights_that_were_written_are_not_read_from_old_copies():
    rank = Served()
    rank.serve([5, 6])
    for index in range(LAYERS):
        rank.write(index, 7)
    rank.slots.bytes_written()
    filled = [{5: layer} for layer in range(LAYERS)]
    assert rank.serve([1, 5]) == [{1: OWN} | each for each in filled], "slots were filled anew"
    assert rank.serve([5]) == filled
    assert rank.status()["slots"]["fills"] == 3 * LAYERS, "they are emptied once"


def test_processing_a_layers_weights_makes_its_slots_stale():
    rank = Served()
    rank.serve([5])
    rank.model.layers[1].sync_tensors(rank.modules[1])
    assert rank.serve([5], Phase.PREFILL, requests=()) == [{5: OWN}] * LAYERS
    assert rank.held() == [[]] * LAYERS


@pytest.mark.parametrize("slots", [SLOTS, ROOM])
def test_a_layer_whose_tensors_were_replaced_uses_its_slots_no_more_nor_does_it_stream_into_them(caplog, slots):
    rank = Served(slots)
    rank.serve([5])
    layer, module = rank.model.layers[1], rank.modules[1]
    with caplog.at_level(logging.WARNING):
        kept = module.w13  # so that the new one gets another address
        module.w13 = kept.clone()
        layer.sync_tensors(module)
        assert rank.serve([5, 6]) == [{5: 0, 6: 1}, {5: OWN, 6: OWN}, {5: 2, 6: 3}]
    assert caplog.text.count("MoE layer 2 no longer uses its slots: something keeps a tensor in the place of w13") == 1
    assert rank.device._share[1].tolist() == [0] * E
    assert rank.slots.at(kept.data_ptr()) is None
    assert [rank.slots.has_room(index) for index in range(LAYERS)] == [slots == ROOM, False, slots == ROOM]
    rank.stream([[5, 6]])
    assert rank.held()[1] == []
    assert rank.status()["slots"]["brought"] == (3 * 2 if slots == ROOM else 0), "of five offloaded, two had been filled"


def test_a_layer_that_loses_a_row_of_slots_uses_them_no_more(caplog):
    rank = Served()
    rank.modules[2].bias = torch.ones(1).expand(E)
    rank.model.layers[2].sync_tensors(rank.modules[2])
    with caplog.at_level(logging.WARNING):
        assert rank.serve([5]) == [{5: 0}, {5: 1}, {5: OWN}]
    assert "MoE layer 3 no longer uses its slots: bias (float32[8]) has no rows of its own" in caplog.text


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
    served = [{0: 6 + layer, 5: 2 * layer} for layer in range(LAYERS)]
    assert rank.serve([0, 5]) == served, "what a slot holds is served from there"
    assert rank.device._share[0].tolist() == [WHOLE] * 5 + [0] * 3
    rank.serve([1])
    rank.serve([2])
    assert rank.held() == [[0, 1, 2]] * LAYERS, "copies of residents go first"
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
    assert slots["hits"] + slots["fills"] + slots["bypasses"] == 8 * LAYERS
    assert slots["hits"] >= 3 * LAYERS
    assert slots["bypasses"] > 0
    assert slots["filled_bytes"] == slots["fills"] * PAGE_BYTES
    assert status["zero_copy_bytes"] == slots["bypasses"] * PAGE_BYTES
    assert status["hit_rate"] == pytest.approx((LAYERS + slots["hits"]) / (9 * LAYERS))
    assert status["byte_hit_rate"] == pytest.approx(status["hit_rate"])
    assert ledger.activations_resident.sum() == LAYERS + slots["hits"] - LAYERS, "in decode"
    assert status["history"]["filled_bytes"][-1] == slots["filled_bytes"]


def test_an_expert_that_is_offloaded_in_part_is_worth_that_part():
    rank = Served(expert_bytes=PAGE_BYTES * 3 // 2)  # three residents fill the first half of the fourth one's blocks
    rank.serve([1])
    assert rank.device._share[0].tolist() == [0, 0, 0, 11, WHOLE, WHOLE, WHOLE, WHOLE]


def many_rows(layer):
    layer.slot_rows = lambda: [(0, 1)] * (MAX_TENSORS + 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "num_slots", 0), "none were requested"),
        (lambda layer: setattr(layer, "tensors", []), "none of its experts is large enough"),
        (lambda layer: setattr(layer, "pool", None), "belongs to no slot pool"),
        (lambda layer: setattr(layer, "without_pool", "its scales interleave"), "its scales interleave"),
        (lambda layer: setattr(layer, "num_experts", MAX_EXPERTS + 1), f"{MAX_EXPERTS + 1} experts, but slots support at most"),
        (many_rows, f"are in {MAX_TENSORS + 1} tensors"),
    ],
)
def test_a_layer_that_can_have_none_says_why(change, reason):
    rank = Rank(config(slots=SLOTS))
    change(rank.model.layers[1])
    made = []
    slots = ModelSlots(rank.model.layers, lambda *each: made.append(each) or CpuSlots(rank.model.counters, *each))
    assert slots.any
    assert [layer is None for layer in made[0][0]] == [False, True, False]
    assert made[0][1] == [LAYERS * SLOTS]
    assert reason in slots.reasons[1]


def test_layers_of_a_pool_with_too_many_experts_have_none():
    rank = Rank(config(slots=SLOTS))
    rank.model.layers[0].pool.num_layers = MAX_POOL_EXPERTS // 16 + 1
    slots = ModelSlots(rank.model.layers, pytest.fail)
    assert not slots.any
    assert f"slots support at most {MAX_POOL_EXPERTS} experts a pool" in slots.reasons[0]


def test_a_layer_that_is_computed_by_other_code_has_none():
    rank = Rank(config(slots=SLOTS))
    slots = ModelSlots(rank.model.layers, pytest.fail, without=lambda layer: "its runner does not")
    assert not slots.any
    assert slots.reasons == ["its runner does not"] * LAYERS
    assert not any(slots.has_room(index) or slots.brings(index) for index in range(LAYERS))
    slots.begin_step(1, Phase.DECODE)
    slots.await_brought()
    assert slots.may_bring()


class Ahead(CpuSlots):
    """Notes what it is told of look-ahead, and where it was resolved."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.told = []

    def resolve(self, layer, *arguments):
        self.told.append(("resolved", layer))

    def look_ahead(self, layer, guess):
        self.told.append(("ahead", layer, guess.logits()))

    def end_layer(self, layer):
        self.told.append(("end", layer))

    def gain(self):
        return "gain"


def told_of_a_step(guess, without=lambda layer: None, inputs=("a", "b", "c")):
    """What slots are told in a step whose layers are computed from ``inputs``."""
    rank, made = Served(), []
    slots = ModelSlots(
        rank.model.layers, lambda *each: made.append(Ahead(rank.model.counters, *each)) or made[0], without, guess=guess
    )
    for index, (module, hidden) in enumerate(zip(rank.modules, inputs, strict=True)):
        slots.begin_layer(hidden)
        if (found := slots.at(module.w13.data_ptr())) is not None:
            found.resolve(torch.zeros(1, 1, dtype=torch.int32), BlockLists(torch.zeros(1).int(), torch.zeros(1).int(), BLOCK))
        slots.end_layer(index)
    return made[0].told, slots


def reading(index, hidden):
    return Guess(lambda: hidden, lambda logits: logits, 0)


def test_the_next_layer_is_looked_ahead_for_once_a_layer_is_resolved_from_its_input():
    told, slots = told_of_a_step(reading)
    layers = [[("resolved", 0), ("ahead", 1, "a"), ("end", 0)], [("resolved", 1), ("ahead", 2, "b"), ("end", 1)]]
    assert told == [*layers[0], *layers[1], ("resolved", 2), ("end", 2)]
    assert slots.looks_ahead
    assert slots.gain() == "gain"


@pytest.mark.parametrize(
    ("guess", "without", "inputs"),
    [
        (None, lambda layer: None, "abc"),
        (lambda index, hidden: None, lambda layer: None, "abc"),
        (reading, lambda layer: "another runner" if layer.index else None, "abc"),
        (reading, lambda layer: None, (None, None, None)),
    ],
    ids=["not asked for", "nothing to guess from", "the next ones have no slots", "inputs that no router sees"],
)
def test_nothing_is_looked_ahead_for_otherwise(guess, without, inputs):
    told, slots = told_of_a_step(guess, without, inputs)
    assert not [each for each in told if each[0] == "ahead"]
    assert slots.looks_ahead == (guess is not None)


def test_a_guess_that_fails_ends_looking_ahead_with_the_reason_and_nothing_else(caplog):
    told, slots = told_of_a_step(lambda index, hidden: 1 / 0)
    assert told[:2] == [("resolved", 0), ("end", 1)], "what it had begun is waited for"
    assert [each for each in told if each[0] == "resolved"] == [("resolved", layer) for layer in range(LAYERS)]
    assert "slot lookahead stopped: ZeroDivisionError" in caplog.text
    assert not slots.looks_ahead
    assert slots.gain() is None

"""A step that streams into slots: which rows each layer computes from, and that they hold its own bytes by then."""

from __future__ import annotations

import ctypes
import logging
from functools import partial

import numpy as np
import pytest
import torch

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.slots import CpuSlots
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.experts.takeover import AllocationMode
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span
from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.policy.slot_policy import EMPTY
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import SLOT_BROUGHT, SLOT_HITS, Phase
from sglang_uvm_offload.streaming.model_slots import ModelSlots
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import IN_SLOTS, Reading, Streamer

E, LAYERS, BLOCK = 8, 4, 16
TWO_LAYERS = 2 * E // LAYERS
"""Slots a layer, of a pool that just holds the experts of two layers."""
POISON = 0xEE
IN_PLACE, BUFFER = "in place", "buffer"
ALL = [[expert, expert + 1] for expert in range(0, E, 2)]
"""The tokens of a step that uses all experts."""


class LateSlots(CpuSlots):
    """What is brought comes when it is awaited. Until then its slots hold nothing of use."""

    def __init__(self, *args):
        super().__init__(*args)
        self.late, self.asked = [], []
        self.failing, self.capturing = None, False

    def may_bring(self):
        return not self.capturing

    def bring(self, layer, beside):
        assert not self.capturing
        self.asked.append(layer)
        before = self.policy.slot_of[layer].copy()
        super().bring(layer, beside)
        mine, now = self._layers[layer], self.policy.slot_of[layer]
        for expert in np.flatnonzero((now != before) & (now != EMPTY)):
            for address, nbytes in mine.rows:
                row = address + (mine.first_slot + int(now[expert])) * nbytes
                self.late.append((row, as_bytes(row, nbytes).copy()))
                as_bytes(row, nbytes)[:] = POISON
        if layer == self.failing:
            self.late.clear()
            self.reset()
            raise ManagedMemoryError("cudaLaunchKernel", "the experts of a layer", Span(0, 1), "no more")

    def await_brought(self):
        for address, values in self.late:
            as_bytes(address, len(values))[:] = values
        self.late.clear()


def as_bytes(address, nbytes):
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=np.uint8)


class Model:
    """``slots``: of each layer. ``sizes``: of each layer, the bytes of an expert in its larger tensor; each has a smaller one,
    and scales."""

    def __init__(self, slots=TWO_LAYERS, resident=0, sizes=None, buffers=2):
        self.memory, self.model, self.modules = EmulatedMemory(), ModelExperts(draft=False), []
        slots = [slots] * LAYERS if isinstance(slots, int) else slots
        sizes = sizes or [2 * PAGE_BYTES] * LAYERS
        self.layers = [self.model.add_layer(self.memory, LayerShard(index, E)) for index in range(LAYERS)]
        for layer, number, size in zip(self.layers, slots, sizes, strict=True):
            module, chosen = torch.nn.Module(), np.arange(E) < resident
            with AllocationMode(E, layer.allocate):
                module.w13 = torch.empty(E, size, dtype=torch.uint8)
                module.w2 = torch.empty(E, PAGE_BYTES, dtype=torch.uint8)
                module.scale = torch.empty(E, 16, dtype=torch.uint8)
            layer.sync_tensors(module)
            self.modules.append(module)
            layer.join_pool(partial(self.model.pool_for, layer))
            layer.place(lambda layout, chosen=chosen: layout.holding(chosen), num_slots=number)
        self.model.place_slots()
        self.device = None
        self.counters = CpuRoutingCounters(LAYERS, E)
        self.slots = ModelSlots(self.layers, self._make)
        self.write(1)
        largest = max((buffer_bytes(layer) for layer in self.layers if not self.slots.has_room(layer.index)), default=0)
        staging = CpuStaging(self.memory, largest, buffers) if largest and buffers else None
        self.copied = []
        self.streamer = Streamer(self.layers, staging, self.slots, 1, lambda row, nbytes: self.copied.append(row))

    def _make(self, *args):
        self.device = LateSlots(self.counters, *args)
        return self.device

    def tensors(self, index):
        return {name: getattr(self.modules[index], name) for name in ("w13", "w2", "scale")}

    def write(self, version):
        """Other weights; whoever holds copies is told."""
        random = np.random.default_rng(version)
        self.truth = [
            {name: random.integers(0, 200, tuple(tensor.shape), dtype=np.uint8) for name, tensor in self.tensors(index).items()}
            for index in range(LAYERS)
        ]
        for index in range(LAYERS):
            for name, tensor in self.tensors(index).items():
                tensor.numpy()[:] = self.truth[index][name]
        self.slots.bytes_written()

    def poison_slots(self):
        """Those that hold nothing."""
        for index, layer in enumerate(self.layers):
            if layer.pool is not None and layer.pool.num_slots:
                assert (self.device.policy.slot_of[index] == EMPTY).all()
                for tensor in self.tensors(index).values():
                    layer.rows_from(tensor.data_ptr())[layer.pool.first_slot(index) :].numpy()[:] = POISON

    def step(self, rows=range(LAYERS), tokens=ALL, phase=Phase.PREFILL, streams=True, requests=(), compute=None):
        """Where each row found its offloaded experts, after a look at all bytes that it computed from."""
        ids = torch.tensor(tokens).reshape(-1, 2)
        streams = streams and self.streamer.streams(len(ids))
        self.counters.begin_step(len(ids), phase)
        self.slots.begin_step(len(ids), phase, requests, streams=streams)
        seen = []
        try:
            if streams:
                self.streamer.begin_step()
            for row in rows:
                reading, failed = self.streamer.enter(row), True
                try:
                    if compute is not None:
                        compute(row)
                    seen.append(self._look(row, reading, ids))
                    failed = False
                finally:
                    if isinstance(reading, Reading):
                        self.streamer.leave(reading, failed)
        finally:
            if streams:
                self.streamer.end_step()
        assert not self.device.late, "what comes now would overwrite what others put there"
        return seen

    def _look(self, row, reading, ids):
        used = torch.unique(ids)
        slots, blocks = self.slots.at(self.modules[row].w13.data_ptr()), used.int()
        if slots is not None:
            slots.resolve(ids, BlockLists(blocks, torch.tensor([len(used) * BLOCK], dtype=torch.int32), BLOCK))
        for name, tensor in self.tensors(row).items():
            table = (tensor if slots is None else slots.all_rows(tensor)).numpy()
            for expert, at in zip(used.tolist(), blocks.tolist(), strict=True):
                assert (table[at] == self.truth[row][name][expert]).all(), f"{name} of expert {expert} of layer {row}"
        if isinstance(reading, Reading):
            return BUFFER
        if slots is None:
            return IN_PLACE
        away = self.device._share[row][used.numpy()] > 0
        from_slots = (blocks >= E).numpy()
        assert (reading == IN_SLOTS) <= bool(from_slots[away].all())
        return IN_SLOTS if from_slots[away].all() else IN_PLACE

    def held(self, row):
        return np.flatnonzero(self.device.policy.slot_of[row] != EMPTY).tolist()


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("slots", [TWO_LAYERS, 6, E])
def test_every_layer_computes_from_slots_with_its_own_bytes(slots, resident):
    model = Model(slots, resident)
    model.poison_slots()
    addresses = [[tensor.data_ptr() for tensor in model.tensors(row).values()] for row in range(LAYERS)]
    for _ in range(3):
        assert model.step() == [IN_SLOTS] * LAYERS
    assert model.device.asked == 3 * list(range(LAYERS)), "each a layer ahead"
    assert addresses == [[tensor.data_ptr() for tensor in model.tensors(row).values()] for row in range(LAYERS)]
    brought = model.counters.slot_counts()[:, Phase.PREFILL, SLOT_BROUGHT]
    assert (brought[:, :resident] == 0).all()
    evicts = slots * LAYERS < (E - resident) * LAYERS
    assert (brought[:, resident:].sum() > (E - resident) * LAYERS) == evicts, "once where all stay"
    assert model.streamer.fault is None
    assert model.copied == []


def test_a_layer_is_brought_while_the_one_before_computes():
    model, asked = Model(), []
    model.step(())
    assert model.device.asked == [0], "before any layer"
    model.device.asked.clear()
    model.step(compute=lambda row: asked.append([*model.device.asked]))
    assert asked == [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize("resident", [0, 3])
def test_layers_that_a_step_skips_or_repeats_compute_from_slots_with_their_own_bytes(resident):
    model = Model(resident=resident)
    for rows in ([2], [3, 0], [0, 0, 1, 1, 3, 3], [1, 0, 1, 0], [0, 2], [3, 2, 1, 0]):
        assert model.step(rows) == [IN_SLOTS] * len(rows)


def test_a_step_that_ends_early_or_fails_in_a_layer_leaves_slots_that_are_right():
    model = Model()

    def fail(row):
        if row == 1:
            raise RuntimeError("injected")

    for _ in range(2):
        assert model.step([0]) == [IN_SLOTS]
        assert model.step(tokens=[[0, 5]], phase=Phase.DECODE, streams=False)
        with pytest.raises(RuntimeError, match="injected"):
            model.step(compute=fail)
        assert model.step(tokens=[[0, 5]], phase=Phase.DECODE, streams=False)[:2] == [IN_SLOTS] * 2
        assert model.step() == [IN_SLOTS] * LAYERS
    model.step(())
    assert model.step() == [IN_SLOTS] * LAYERS


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        ([E, 0, E, E], [IN_SLOTS, BUFFER, IN_SLOTS, IN_SLOTS]),
        ([0, E, 0, E], [BUFFER, IN_SLOTS, BUFFER, IN_SLOTS]),
        ([0, 0, E, E], [BUFFER, BUFFER, IN_SLOTS, IN_SLOTS]),
        ([0, E, E - 1, 0], [BUFFER] * LAYERS),
    ],
)
@pytest.mark.parametrize("buffers", [1, 2])
def test_layers_without_slots_or_in_a_pool_with_too_few_stream_through_buffers(slots, expected, buffers):
    model = Model(slots, resident=1, buffers=buffers)
    for _ in range(3):
        assert model.step() == expected
    assert model.copied == 3 * [row for row, how in enumerate(expected) if how == BUFFER]
    assert {*model.device.asked} == {row for row, how in enumerate(expected) if how == IN_SLOTS}
    for rows in ([3, 0], [1, 1, 2], [2, 0, 1]):
        assert model.step(rows) == [expected[row] for row in rows]


def test_layers_with_too_few_slots_read_in_place_without_buffers():
    model = Model([E, E, 0, 0], buffers=0)
    assert model.step() == [IN_SLOTS, IN_SLOTS, IN_PLACE, IN_PLACE]


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0)])
def test_two_pools_serve_the_layers_of_their_shapes(order):
    model = Model(E, sizes=[(2 + 2 * which) * PAGE_BYTES for which in order])
    assert len(model.model.pools()) == 2
    model.poison_slots()
    for rows in (range(LAYERS), range(LAYERS), [0, 2], [3, 0, 0, 1], range(LAYERS)):
        assert model.step(rows) == [IN_SLOTS] * len(rows)


def test_a_pool_with_too_few_slots_beside_another_streams_through_buffers():
    small, large = 2 * PAGE_BYTES, 4 * PAGE_BYTES
    model = Model([E, E, 2, 2], sizes=[small, small, large, large])
    for _ in range(2):
        assert model.step() == [IN_SLOTS, IN_SLOTS, BUFFER, BUFFER]


def test_experts_that_move_between_the_copy_and_the_layer_are_right_and_the_next_step_follows():
    model, random = Model(resident=3), np.random.default_rng(0)

    def move(row):
        for layer in (model.layers[row], model.layers[(row + 1) % LAYERS]):
            wanted = layer.layouts[0].holding(random.random(E) < 0.5)
            after = np.concatenate([wanted, *(layout.holding(random.random(E) < 0.5) for layout in layer.layouts[1:])])
            layer.demote(after)
            layer.promote(after)

    for _ in range(5):
        model.step(compute=move)
        assert model.step() == [IN_SLOTS] * LAYERS


def test_a_layer_that_is_all_resident_brings_nothing_and_its_next_one_comes_in_its_time():
    model = Model()
    layer = model.layers[1]
    layer.promote(np.ones(len(layer.resident_extents()), dtype=bool))
    asked = []
    model.step(compute=lambda row: asked.append([*model.device.asked]))
    assert asked == [[0, 2], [0, 2], [0, 2, 3], [0, 2, 3]]
    assert model.held(1) == []


def test_weights_that_change_between_steps_are_brought_anew():
    model = Model(E)
    for version in range(2, 5):
        assert model.step() == [IN_SLOTS] * LAYERS
        model.write(version)
        if version == 3:
            model.step(tokens=[[1, 2]], phase=Phase.DECODE, streams=False)
    assert model.step() == [IN_SLOTS] * LAYERS


@pytest.mark.parametrize("failing", range(LAYERS))
def test_a_copy_that_fails_ends_streaming_and_all_layers_read_in_place(caplog, failing):
    """What was chosen for the copy is in no slot, in this step or later."""
    model = Model()
    model.poison_slots()
    model.device.failing = failing
    with caplog.at_level(logging.ERROR):
        seen = model.step()
    computed_before = max(failing - 1, 0)
    assert seen == [IN_SLOTS] * computed_before + [IN_PLACE] * (LAYERS - computed_before)
    assert "cudaLaunchKernel failed on the experts of a layer" in str(model.streamer.fault)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "streaming stopped" in caplog.text
    assert "read offloaded experts in place" in caplog.text
    model.device.failing, asked = None, [*model.device.asked]
    assert model.step() == [IN_PLACE] * LAYERS
    model.step(tokens=[[1, 2]], phase=Phase.DECODE, streams=False)
    assert model.step(tokens=[[1, 2]], phase=Phase.DECODE, streams=False) == [IN_SLOTS] * LAYERS, "slots go on"
    assert model.device.asked == asked


def test_a_fault_of_a_buffer_waits_for_what_is_on_its_way_to_slots():
    model, kept = Model([E, 0, E, 0]), []

    def keep(row):
        if row == 1:
            kept.append(model.modules[1].w2[1:])

    assert model.step(compute=keep) == [IN_SLOTS, BUFFER, IN_SLOTS, IN_PLACE]
    assert "keeps a reference to the stream buffer" in str(model.streamer.fault)
    assert len(model.step()) == LAYERS


def test_a_step_that_a_graph_captures_brings_nothing():
    model = Model()
    model.device.capturing = True
    assert not model.streamer.streams(len(ALL))
    assert model.step() == [IN_PLACE] * LAYERS
    assert model.device.asked == []
    model.device.capturing = False
    assert model.step() == [IN_SLOTS] * LAYERS


def test_a_step_without_valid_rows_brings_nothing():
    model = Model()
    model.counters.begin_step(0, Phase.PREFILL)
    model.slots.begin_step(0, Phase.PREFILL, (), streams=True)
    model.streamer.begin_step()
    model.streamer.enter(0)
    model.streamer.end_step()
    assert [model.held(row) for row in range(LAYERS)] == [[]] * LAYERS
    assert not model.streamer.streams(0)


def decode(model, tokens, times=1):
    for _ in range(times):
        model.step(tokens=tokens, phase=Phase.DECODE, streams=False)


def test_what_a_prompt_ends_with_is_in_slots_afterwards_and_what_decoding_uses_stays():
    model = Model(6)
    decode(model, [[1, 2]], 20)
    prompt = [[4, 5], [6, 7], [0, 3], *[[1, 5]] * 3]
    for _ in range(3):
        assert model.step(tokens=prompt, requests=[(0, len(prompt))]) == [IN_SLOTS] * LAYERS
    assert all({1, 2, 5} <= {*model.held(row)} for row in range(LAYERS)), [model.held(row) for row in range(LAYERS)]
    before = model.counters.slot_counts()[:, Phase.DECODE, SLOT_HITS].sum()
    decode(model, [[1, 5]])
    assert model.counters.slot_counts()[:, Phase.DECODE, SLOT_HITS].sum() == before + 2 * LAYERS


def test_a_step_that_streams_counts_no_hits_and_fills_nothing():
    model = Model(6)
    model.step(requests=[(0, len(ALL))])
    counts = model.counters.slot_counts()
    assert counts[..., SLOT_BROUGHT, :].sum() > 0
    counts[..., SLOT_BROUGHT, :] = 0
    assert not counts.any()

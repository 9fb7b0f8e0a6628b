"""What a step that streams through buffers does at each layer: which bytes it computes from, and that the layer is its own
again afterwards."""

from __future__ import annotations

import dataclasses
import gc
import logging

import numpy as np
import pytest
import torch
from builders.managers import placed_layer

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.cpu.staging import CpuStaging
from sglang_uvm_offload.experts.takeover import AllocationMode, HeldTensor
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.memory.protocol import ManagedMemoryError, Span
from sglang_uvm_offload.streaming.replicas import buffer_bytes
from sglang_uvm_offload.streaming.streamer import Streamer

E, LAYERS = 4, 4
POISON = 0xEE


@dataclasses.dataclass(frozen=True)
class Prepared:
    """As a quantisation method keeps weights for its kernels."""

    w2: torch.Tensor


class Method:
    """Holds tensors."""


class StrictStaging(CpuStaging):
    """Buffers whose bytes are destroyed as soon as they may be."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = []
        self.read = set()
        self.fails = False
        self.capturing = False
        for buffer in self.buffers:
            buffer.fill_(POISON)

    def may_copy(self):
        return not self.capturing

    def begin_step(self):
        assert not self.read
        self.calls.append("begin step")
        for buffer in self.buffers:
            buffer.fill_(POISON)

    def copy(self, buffer, parts, in_vram=()):
        assert not self.capturing
        assert buffer not in self.read
        assert [mask.tolist() for mask in in_vram] == [self.places(part) for part in parts]
        self.buffers[buffer].fill_(POISON)
        if self.fails:
            raise ManagedMemoryError("cudaLaunchKernel", "w13", Span(0, 1), "no more")
        super().copy(buffer, parts)
        self.calls.append(("copy", parts[0].managed.name[-1], buffer))

    def places(self, part):
        """Whether each block is in VRAM."""
        return self._memory.in_vram([(part.managed, at) for at in range(0, part.nbytes, self._memory.block_bytes)]).tolist()

    def acquire(self, buffer):
        self.read.add(buffer)

    def release(self, buffer):
        self.read.remove(buffer)


class Model:
    """Layers of a parameter, a tensor in a dataclass of the method, two views that share its storage, one of them with the
    experts last, and plain scales."""

    def __init__(self, resident=2, buffers=2, min_tokens=8):
        self.memory = EmulatedMemory()
        self.modules, self.methods, self.layers = [], [], []
        for index in range(LAYERS):
            chosen = np.arange(E) < resident
            layer = placed_layer(self.memory, LayerShard(index, E), lambda layout, chosen=chosen: layout.holding(chosen))
            module, method = torch.nn.Module(), Method()
            with AllocationMode(E, layer.allocate):
                module.w13 = torch.nn.Parameter(torch.empty(E, PAGE_BYTES // 2), requires_grad=False)
                w2 = torch.empty(E, PAGE_BYTES // 2, dtype=torch.bfloat16)
            method.prepared = Prepared(w2)
            method.halves = w2.view(E, 2, -1)[:, 1]
            method.experts_last = w2.view(E, 2, -1).permute(1, 2, 0)
            module.scales = torch.full((E, 2), float(index))
            layer.sync_tensors(module, method)
            self.modules.append(module)
            self.methods.append(method)
            self.layers.append(layer)
        self.write(1)
        self.staging = StrictStaging(self.memory, max(map(buffer_bytes, self.layers)), buffers)
        self.copied = []
        self.streamer = self.streaming(min_tokens)

    def streaming(self, min_tokens):
        return Streamer(self.layers, self.staging, None, min_tokens, lambda row, nbytes: self.copied.append((row, nbytes)))

    def write(self, version):
        for index in range(LAYERS):
            for number, tensor in enumerate(self.tensors(index)[:2]):
                values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(100 * version + 10 * index + number))
                tensor.copy_(values)

    def tensors(self, index):
        return [
            self.modules[index].w13,
            self.methods[index].prepared.w2,
            self.methods[index].halves,
            self.methods[index].experts_last,
            self.modules[index].scales,
        ]

    def addresses(self):
        return [[tensor.data_ptr() for tensor in self.tensors(index)] for index in range(LAYERS)]

    def expected(self):
        return [[tensor.clone() for tensor in self.tensors(index)] for index in range(LAYERS)]

    def in_buffer(self, index):
        """Which of the layer's tensors lie in a stream buffer now."""
        inside = []
        for tensor in self.tensors(index):
            ranges = [(buffer.data_ptr(), buffer.data_ptr() + buffer.numel()) for buffer in self.staging.buffers]
            inside.append(any(begin <= tensor.data_ptr() < end for begin, end in ranges))
        return inside

    def step(self, tokens=8, rows=range(LAYERS), compute=None):
        """Returns for each row the tensors that it computed with, and whether it streamed."""
        seen = []
        try:
            if self.streamer.streams(tokens):
                self.streamer.begin_step()
            for row in rows:
                reading = self.streamer.enter(row)
                failed = True
                try:
                    if compute is not None:
                        compute(row)
                    assert self.in_buffer(row) == [reading is not None] * 4 + [False]
                    seen.append((row, [tensor.clone() for tensor in self.tensors(row)], reading is not None))
                    failed = False
                finally:
                    if reading is not None:
                        self.streamer.leave(reading, failed)
        finally:
            self.streamer.end_step()
        return seen


def same(seen, expected):
    return all(torch.equal(a, b) for row, tensors, _ in seen for a, b in zip(tensors, expected[row], strict=True))


@pytest.mark.parametrize("buffers", [1, 2])
def test_every_layer_computes_from_a_buffer_with_its_own_bytes(buffers):
    model = Model(buffers=buffers)
    before, expected = model.addresses(), model.expected()
    for _ in range(3):
        seen = model.step()
        assert same(seen, expected)
        assert [streamed for _, _, streamed in seen] == [True] * LAYERS
    assert model.addresses() == before
    assert model.copied == 3 * [(row, 2 * 3 * PAGE_BYTES) for row in range(LAYERS)], "each offloaded byte once a step"
    assert model.streamer.fault is None


def test_steps_of_the_threshold_or_more_stream_and_of_a_threshold_of_zero_all_with_tokens():
    assert [streamed for _, _, streamed in Model(min_tokens=8).step(tokens=7)] == [False] * LAYERS
    model = Model(min_tokens=0)
    assert [streamed for _, _, streamed in model.step(tokens=1)] == [True] * LAYERS
    assert [streamed for _, _, streamed in model.step(tokens=0)] == [False] * LAYERS


def test_a_step_whose_layers_compute_elsewhere_is_told_once(caplog):
    model = Model()
    with caplog.at_level(logging.WARNING):
        Model(resident=E).step()  # which has nothing to bring
        model.step()
        assert not caplog.records
        model.step(rows=())
        model.step(rows=())
    assert [record.getMessage().split(": ")[1][:46] for record in caplog.records] == [
        "a step of 8 tokens or more did not stream and "
    ]


def test_a_layer_that_is_all_resident_reads_its_own_memory():
    model = Model()
    model.layers[1].promote(np.ones(len(model.layers[1].resident_extents()), dtype=bool))
    seen = model.step()
    assert [streamed for _, _, streamed in seen] == [True, False, True, True]
    assert same(seen, model.expected())
    assert [row for row, _ in model.copied] == [0, 2, 3]


def test_experts_that_move_during_a_step_are_copied_wherever_they_lie():
    model = Model()
    expected = model.expected()

    def swap(row):
        layer = model.layers[(row + 1) % LAYERS]
        after = ~layer.resident_extents()
        layer.demote(after & layer.resident_extents())
        layer.promote(after)

    assert same(model.step(compute=swap), expected)
    assert same(model.step(compute=swap), expected)
    assert model.expected()[0][0].equal(expected[0][0])


def test_layers_that_a_step_skips_or_repeats_compute_with_their_own_bytes():
    model = Model()
    expected = model.expected()
    for rows in ([2], [3, 0], [0, 0, 1, 1, 3, 3], [1, 0, 1, 0], [0, 2]):
        seen = model.step(rows=rows)
        assert same(seen, expected)
        assert all(streamed for _, _, streamed in seen)


def in_the_layer(model, monkeypatch):
    def fail(row):
        part = model.tensors(row)[1][1:]  # which the error's traceback keeps
        if row == 1:
            raise RuntimeError(f"injected, with {part.shape}")

    return fail


def while_pointing_at_a_buffer(model, monkeypatch):
    places = model.streamer._replicas_of(1)._places
    put, failing = places[-1].held.put, []

    def fail(tensor):
        failing.append(tensor)
        if len(failing) == 1:
            raise RuntimeError("injected")
        put(tensor)

    places[-1] = places[-1]._replace(held=HeldTensor(places[-1].held.get, fail))


def of_the_device(model, monkeypatch):
    def fail(buffer):
        raise RuntimeError("injected")

    monkeypatch.setattr(model.staging, "acquire", fail)


@pytest.mark.parametrize("error", [in_the_layer, while_pointing_at_a_buffer, of_the_device], ids=lambda it: it.__name__)
def test_after_an_error_the_tensors_of_a_layer_are_its_own(error, monkeypatch):
    model = Model()
    before, expected = model.addresses(), model.expected()
    with pytest.raises(RuntimeError, match="injected"):
        model.step(compute=error(model, monkeypatch))
    assert model.addresses() == before
    assert same([(row, model.tensors(row), False) for row in range(LAYERS)], expected)
    assert model.streamer.fault is None
    if error is in_the_layer:
        assert same(model.step(), expected)


def test_a_failing_copy_ends_streaming_and_the_step_reads_in_place(caplog):
    model = Model()
    before, expected = model.addresses(), model.expected()

    def fail(row):
        model.staging.fails = row == 1

    with caplog.at_level(logging.ERROR):
        seen = model.step(compute=fail)
    assert same(seen, expected)
    assert [streamed for _, _, streamed in seen] == [True, True, False, False]
    assert model.addresses() == before
    assert "cudaLaunchKernel failed on w13" in str(model.streamer.fault)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    model.staging.fails = False
    copied = len(model.copied)
    assert same(model.step(), expected)
    assert len(model.copied) == copied


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_layer_whose_code_keeps_a_tensor_of_the_buffer_ends_streaming_and_is_right_for_good(caplog, buffers):
    model = Model(buffers=buffers)
    expected = model.expected()
    kept = {}

    def keep(row):
        if row == 1:
            kept[row] = model.methods[row].prepared.w2[1:]

    with caplog.at_level(logging.ERROR):
        seen = model.step(compute=keep)
    assert same(seen, expected)
    assert "MoE layer 1 keeps a reference to the stream buffer" in str(model.streamer.fault)
    for _ in range(3):
        assert same(model.step(), expected)
    assert torch.equal(kept[1], expected[1][1][1:])


def test_a_step_that_a_graph_captures_reads_in_place():
    model = Model()
    model.staging.capturing = True
    assert [streamed for _, _, streamed in model.step()] == [False] * LAYERS
    model.staging.capturing = False

    def capture(row):
        model.staging.capturing = True

    assert [streamed for _, _, streamed in model.step(rows=[0, 1], compute=capture)] == [True, False]


def replace_w13(model, index):
    """As an update of the weights does that repacks them."""
    module, layer = model.modules[index], model.layers[index]
    with AllocationMode(E, layer.allocate):
        new = torch.empty_like(module.w13)
    new.copy_(torch.randn(new.shape, generator=torch.Generator().manual_seed(77)))
    module.w13 = torch.nn.Parameter(new, requires_grad=False)
    return layer


def test_replaced_tensors_are_copied_from_then_on():
    model = Model()
    model.step()
    old = model.modules[1].w13.data  # somebody still has it
    layer = replace_w13(model, 1)
    layer.sync_tensors(model.modules[1], model.methods[1])
    seen = model.step()
    assert same(seen, model.expected())
    assert not torch.equal(old, model.modules[1].w13)
    assert [streamed for _, _, streamed in seen] == [True] * LAYERS


@pytest.mark.parametrize("kept", [True, False], ids=["the old one is in use", "the old one is gone"])
def test_a_tensor_that_was_replaced_unnoticed_is_used_and_not_reverted(kept):
    model = Model()
    model.step()
    old = [model.modules[2].w13.data] if kept else []
    fresh = torch.randn(model.modules[2].w13.shape)
    model.modules[2].w13.data = fresh
    for _ in range(3):
        seen = model.step()
        assert torch.equal(seen[2][1][0], fresh)
        assert [streamed for _, _, streamed in seen] == [True, True, False, True]
    assert model.modules[2].w13.data_ptr() == fresh.data_ptr()
    assert not any(torch.equal(it, fresh) for it in old)


def test_what_the_code_of_a_layer_replaces_stays_replaced():
    model = Model()
    fresh = torch.randn(model.modules[1].w13.shape)

    model.streamer.begin_step()
    reading = model.streamer.enter(1)
    model.modules[1].w13 = torch.nn.Parameter(fresh, requires_grad=False)
    model.streamer.leave(reading)
    model.streamer.end_step()
    assert model.modules[1].w13.data_ptr() == fresh.data_ptr()
    assert model.in_buffer(1) == [False] * 5


@pytest.mark.slow
def test_nothing_keeps_replaced_tensors_alive():
    model = Model()
    model.step()
    old = model.layers[1].tensors[0].managed
    model.modules[1].w13 = torch.nn.Parameter(torch.zeros(E, 3), requires_grad=False)
    gc.collect()
    assert not model.memory.holds(old)


def test_a_layer_larger_than_the_buffers_reads_in_place():
    model = Model()
    model.staging.buffers = [buffer[: buffer.numel() // 2] for buffer in model.staging.buffers]
    model.streamer = model.streaming(8)
    assert [streamed for _, _, streamed in model.step()] == [False] * LAYERS
    assert model.copied == []

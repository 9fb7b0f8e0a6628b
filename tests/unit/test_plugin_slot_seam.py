"""Which lists and which TMA descriptors are changed for slots: those of a layer's own weights, and no others."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels

from sglang_uvm_offload.plugin.slot_seam import SlotSeam

E, ROWS = 4, 6


class Slots:
    num_rows = ROWS

    def __init__(self) -> None:
        self.resolved: list[tuple[Any, ...]] = []

    def resolve(self, *given: Any) -> None:
        self.resolved.append(given)


def weight() -> torch.Tensor:
    return torch.zeros(ROWS, 32, 32)[:E]


@pytest.fixture
def layer() -> tuple[SlotSeam, Slots, torch.Tensor, torch.Tensor]:
    seam, slots, w1, w2 = SlotSeam(), Slots(), weight(), weight()
    seam.add(w1.data_ptr(), w2.data_ptr(), slots)
    return seam, slots, w1, w2


@pytest.fixture(autouse=True)
def no_cached_descriptors() -> Iterator[None]:
    kernels.clear_b_tma_desc_cache()
    yield
    kernels.clear_b_tma_desc_cache()


IDS, BLOCKS, PADDED = torch.tensor([[1, 2]]), torch.tensor([1, 2, 0], dtype=torch.int32), torch.tensor([32], dtype=torch.int32)
PREPARED = ({"BLOCK_SIZE_M": 16}, {"BLOCK_SIZE_M": 16}, False, False, torch.arange(32), BLOCKS, PADDED)


def prepare(seam: SlotSeam, w1: torch.Tensor, w2: torch.Tensor) -> Any:
    calls = []

    def original(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return PREPARED

    hidden = torch.zeros(1, 32)
    result = seam._around_prepare(original, hidden, w1, w2, IDS, use_fp8_w8a8=False)
    assert calls == [((hidden, w1, w2, IDS), {"use_fp8_w8a8": False})]
    return result


def test_a_layers_list_is_resolved_after_it_was_made(layer) -> None:
    seam, slots, w1, w2 = layer
    assert prepare(seam, w1, w2) is PREPARED
    [(ids, blocks, padded, block_size)] = slots.resolved
    assert (ids is IDS, blocks is BLOCKS, padded is PADDED, block_size) == (True, True, True, 16)


def test_a_list_stays_unless_both_weights_are_the_same_layers(layer) -> None:
    seam, slots, w1, w2 = layer
    other, w3, w4 = Slots(), weight(), weight()
    seam.add(w3.data_ptr(), w4.data_ptr(), other)
    for pair in ((w1, weight()), (weight(), w2), (w1, w4), (w3, w2), (w2, w1), (w1[1:], w2)):
        assert prepare(seam, *pair) is PREPARED
    assert not slots.resolved
    assert not other.resolved
    prepare(seam, w3, w4)
    assert (len(slots.resolved), len(other.resolved)) == (0, 1)


def test_a_layer_in_a_stream_buffer_keeps_its_list(layer) -> None:
    seam, slots, w1, w2 = layer
    first, second = torch.nn.Parameter(w1, requires_grad=False), torch.nn.Parameter(w2, requires_grad=False)
    prepare(seam, first, second)
    first.data, second.data = weight(), weight()
    prepare(seam, first, second)
    first.data, second.data = w1, w2
    prepare(seam, first, second)
    assert len(slots.resolved) == 2


def test_no_layer_is_resolved_once_cleared(layer) -> None:
    seam, slots, w1, w2 = layer
    seam.clear()
    assert prepare(seam, w1, w2) is PREPARED
    assert not slots.resolved


def described(seam: SlotSeam, tensor: torch.Tensor) -> Any:
    return seam._around_descriptor(kernels._get_b_tma_desc_cached, tensor, 16, 32)


def test_descriptors_span_the_slots_of_tensors_that_have_some(layer) -> None:
    seam, _, w1, w2 = layer
    other = weight()
    plain = kernels._get_b_tma_desc_cached(other, 16, 32)
    assert described(seam, other) is plain
    for tensor in (w1, w2):
        wide, cached = described(seam, tensor), kernels._get_b_tma_desc_cached(tensor, 16, 32)
        assert list(cached.shape) == [E, 32, 32]
        assert list(wide.shape) == [ROWS, 32, 32]
        assert wide.base is cached.base is tensor
        assert (wide.strides, wide.block_shape, wide.padding) == (cached.strides, cached.block_shape, cached.padding)


def test_no_wide_descriptor_is_left_for_a_stream_buffer_or_once_cleared(layer) -> None:
    seam, _, w1, _ = layer
    parameter, buffer = torch.nn.Parameter(w1, requires_grad=False), weight()
    assert described(seam, parameter).shape[0] == ROWS
    parameter.data = buffer
    assert described(seam, parameter).shape[0] == E
    parameter.data = w1
    assert described(seam, parameter).shape[0] == ROWS
    seam.clear()
    assert described(seam, parameter).shape[0] == E


def test_both_functions_are_hooked_where_sglang_has_them() -> None:
    hooked = []
    SlotSeam().install(lambda target, hook, kind: hooked.append(target))
    assert [pkgutil.resolve_name(target).__name__ for target in hooked] == ["_prepare_fused_moe_run", "_get_b_tma_desc_cached"]

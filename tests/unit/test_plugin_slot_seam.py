"""Which lists and which TMA descriptors are changed for slots: those of a layer's own tensors, and no others."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels

from sglang_uvm_offload.memory.slots import Rows, SlotLayer
from sglang_uvm_offload.plugin.slots.triton import TritonSlotSeam
from sglang_uvm_offload.streaming.model_slots import LayerSlots

pytestmark = pytest.mark.sglang

E, ROWS = 4, 6


class Device:
    """Remembers what it was given to resolve."""

    aligns = False

    def __init__(self) -> None:
        self.resolved: list[tuple[Any, ...]] = []
        self.filling = False

    def resolve(self, *given: Any) -> None:
        self.resolved.append(given)
        self.filling = bool(given[-1])

    def await_fills(self) -> bool:
        filling, self.filling = self.filling, False
        return filling


def weight() -> torch.Tensor:
    return torch.zeros(ROWS, 32, 32)[:E]


class Layer:
    """Two weights, and scales of the first, with rows for slots."""

    def __init__(self, index: int = 0) -> None:
        self.device = Device()
        self.w1, self.w2, self.scale = weight(), weight(), torch.zeros(ROWS, 3)[:E]
        rows = [Rows(tensor.data_ptr(), tensor.stride(0) * 4) for tensor in (self.w1, self.w2, self.scale)]
        experts: Any = SimpleNamespace(index=index, layer_id=7, pool=SimpleNamespace(num_rows=ROWS))
        self.slots = LayerSlots(experts, SlotLayer(rows, E, 0, E), self.device)  # type: ignore[arg-type]

    @property
    def resolved(self) -> list[tuple[Any, ...]]:
        return self.device.resolved


def seam_of(*layers: Layer) -> TritonSlotSeam:
    seam = TritonSlotSeam()
    at = {address: layer.slots for layer in layers for address in layer.slots.row_bytes}
    seam.find = at.get
    seam.layers = layers  # type: ignore[attr-defined]
    return seam


@pytest.fixture
def layer() -> Layer:
    return Layer()


@pytest.fixture(autouse=True)
def no_cached_descriptors() -> Iterator[None]:
    kernels.clear_b_tma_desc_cache()
    yield
    kernels.clear_b_tma_desc_cache()


IDS = torch.tensor([[1, 2]])
LISTS = (torch.arange(32), torch.tensor([1, 2, 0], dtype=torch.int32), torch.tensor([32], dtype=torch.int32))
HIDDEN = torch.zeros(1, 32)


def aligned(seam: TritonSlotSeam) -> tuple[torch.Tensor, ...]:
    return seam.around_align(lambda ids, block_size, num_experts: LISTS, IDS, 16, E)


def gemm(seam: TritonSlotSeam, weights: torch.Tensor, filling: list[bool]) -> None:
    def original(rows: torch.Tensor, given: torch.Tensor, *more: Any, **named: Any) -> bool:
        assert (rows is HIDDEN, given is weights, more, named) == (True, True, ("bias",), {"top_k": 2})
        filling.append(any(layer.device.filling for layer in seam.layers))  # type: ignore[attr-defined]
        return True

    assert seam._around_gemm(original, HIDDEN, weights, "bias", top_k=2)


def compute(seam: TritonSlotSeam, w1: torch.Tensor, w2: torch.Tensor, *more: Any, **tensors: Any) -> list[bool]:
    """As SGLang does it: ``fused_experts`` aligns, then calls two GEMMs. Returns whether slots are being filled at each."""
    filling: list[bool] = []

    def inside(*args: Any, **kwargs: Any) -> str:
        assert aligned(seam) is LISTS
        gemm(seam, args[1], filling)
        gemm(seam, args[2], filling)
        return "computed"

    topk, settings = object(), object()
    assert seam.around_experts(inside, HIDDEN, w1, w2, topk, settings, *more, **tensors) == "computed"
    return filling


def test_a_layer_is_resolved_when_its_ids_are_aligned_and_what_the_second_gemm_reads_comes_before_it(layer: Layer) -> None:
    assert compute(seam_of(layer), layer.w1, layer.w2, w1_scale=layer.scale) == [True, False]
    [(index, ids, lists, later)] = layer.resolved
    assert (index, ids is IDS, lists.blocks is LISTS[1], lists.padded is LISTS[2]) == (0, True, True, True)
    assert (lists.block_size, lists.order, later) == (16, None, {layer.w2.data_ptr()})


def test_what_both_gemms_read_comes_before_the_first_one(layer: Layer) -> None:
    compute(seam_of(layer), layer.w1, layer.w2, w1_scale=layer.scale, w2_scale=layer.scale[:, 1:])
    [(*_, later)] = layer.resolved
    assert later == {layer.w2.data_ptr()}


def test_a_second_gemm_that_did_not_wait_is_an_error(layer: Layer) -> None:
    """Its answer may be of other experts' bytes."""
    seam = seam_of(layer)
    with pytest.raises(RuntimeError, match="MoE layer 7 was computed before its slots were filled"):
        seam.around_experts(lambda *args: aligned(seam), HIDDEN, layer.w1, layer.w2)
    assert not layer.device.filling


def test_few_ids_are_aligned_by_the_slots_where_these_do(layer: Layer) -> None:
    layer.device.aligns, seam = True, seam_of(layer)

    def forward(ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        found = []

        def inside(*given: Any) -> None:
            found.extend(seam.around_align(lambda *_, **__: LISTS, ids, *args, **kwargs))
            seam.before_gemm(layer.w2)

        seam.around_experts(inside, HIDDEN, layer.w1, layer.w2)
        return tuple(found)

    for counts, flags in ((1, {}), (2, {"return_inactive_prefix_count": True})):
        for rows in (1, 32):
            ids = torch.zeros(rows, 2, dtype=torch.int32)
            order, blocks, padded = forward(ids, 16, E, **flags)
            _, told, lists, _ = layer.resolved[-1]
            assert (told is ids, lists.order is order, lists.blocks is blocks, lists.padded is padded) == (True,) * 4
            assert (len(order), len(blocks), len(padded)) == (rows * 2 * 16, rows * 2, counts)
            assert {tensor.dtype for tensor in (order, blocks, padded)} == {torch.int32}
    for ids, flags in ((torch.zeros(33, 2), {}), (IDS, {"ignore_invalid_expert": True}), (IDS, {"pad_expert_ids": True})):
        assert forward(ids, 16, E, **flags)[1] is LISTS[1], "by SGLang's"
        assert layer.resolved[-1][2].order is None


def test_a_list_stays_unless_both_weights_are_the_same_layers(layer: Layer) -> None:
    other = Layer(1)
    seam = seam_of(layer, other)
    strangers = (weight(), weight())
    for pair in ((layer.w1, strangers[0]), (strangers[1], layer.w2), (layer.w1, other.w2), (layer.w1[1:], layer.w2)):
        compute(seam, *pair)
    assert not layer.resolved
    assert not other.resolved
    compute(seam, other.w1, other.w2)
    assert ([*layer.resolved], [given[0] for given in other.resolved]) == ([], [1])


def test_a_list_stays_where_any_tensor_at_its_rows_is_not_the_layers(layer: Layer, caplog: pytest.LogCaptureFixture) -> None:
    """Scales that were copied for the call have no rows for slots, so a kernel would read what lies behind them."""
    seam = seam_of(layer)
    for name in ("b1", "b2", "w1_scale", "w2_scale", "w1_zp", "w2_zp"):
        compute(seam, layer.w1, layer.w2, **{name: layer.scale.clone()})
        compute(seam, layer.w1, layer.w2, **{name: layer.scale.clone()})
        assert not layer.resolved
        assert caplog.text.count(f"{name} (4, 3) is not a tensor of the layer") == 1
    compute(seam, layer.w1, layer.w2, w1_scale=torch.tensor(1.0))
    compute(seam, layer.w1, layer.w2, w1_scale=layer.scale[:, ::3].t().t()[:, :1].expand(E, 2)[0:1].expand(E, 2))
    assert not layer.resolved
    compute(seam, layer.w1, layer.w2, w1_scale=layer.scale, w2_scale=layer.scale[:, 1:], b1=None)
    assert len(layer.resolved) == 1


def test_a_list_stays_where_a_caller_names_fewer_tensors(layer: Layer) -> None:
    compute(seam_of(layer), layer.w1, layer.w2, layer.scale)
    assert not layer.resolved


def test_an_error_leaves_no_layer_behind(layer: Layer) -> None:
    seam = seam_of(layer)

    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        seam.around_experts(fails, HIDDEN, layer.w1, layer.w2)
    assert aligned(seam) is LISTS
    assert not layer.resolved


def test_an_error_between_the_gemms_leaves_no_copy_behind(layer: Layer) -> None:
    seam = seam_of(layer)

    def fails(*args: Any, **kwargs: Any) -> None:
        aligned(seam)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        seam.around_experts(fails, HIDDEN, layer.w1, layer.w2)
    assert layer.resolved
    assert not layer.device.filling


def test_a_layer_in_a_stream_buffer_keeps_its_list(layer: Layer) -> None:
    seam = seam_of(layer)
    first, second = torch.nn.Parameter(layer.w1, requires_grad=False), torch.nn.Parameter(layer.w2, requires_grad=False)
    compute(seam, first, second)
    first.data, second.data = weight(), weight()
    compute(seam, first, second)
    first.data, second.data = layer.w1, layer.w2
    compute(seam, first, second)
    assert len(layer.resolved) == 2


def described(seam: TritonSlotSeam, tensor: torch.Tensor) -> Any:
    return seam._around_descriptor(kernels._get_b_tma_desc_cached, tensor, 16, 32)


def test_descriptors_span_the_slots_of_tensors_that_have_some(layer: Layer) -> None:
    seam, other = seam_of(layer), weight()
    plain = kernels._get_b_tma_desc_cached(other, 16, 32)
    assert described(seam, other) is plain
    for tensor in (layer.w1, layer.w2):
        wide, cached = described(seam, tensor), kernels._get_b_tma_desc_cached(tensor, 16, 32)
        assert list(cached.shape) == [E, 32, 32]
        assert list(wide.shape) == [ROWS, 32, 32]
        assert wide.base is cached.base is tensor
        assert (wide.strides, wide.block_shape, wide.padding) == (cached.strides, cached.block_shape, cached.padding)


def test_the_functions_are_hooked_where_sglang_has_them() -> None:
    hooked = []
    TritonSlotSeam().install(lambda target, hook, kind: hooked.append(target))
    names = [pkgutil.resolve_name(target).__name__ for target in hooked]
    assert names == ["fused_experts", "moe_align_block_size", "invoke_fused_moe_kernel", "_get_b_tma_desc_cached"]

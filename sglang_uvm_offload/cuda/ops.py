"""Python bindings of ``kernels/uvm_ops.cu``: one method per C function. Failures raise exceptions.

ctypes releases the GIL during each call. Enum values come from the library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_longlong, c_size_t, c_void_p
from pathlib import Path

import numpy as np
import torch

from sglang_uvm_offload.cuda.build import BuildFailure, build
from sglang_uvm_offload.cuda.device import device_arch
from sglang_uvm_offload.cuda.structs import (
    Counted,
    CudaFailure,
    SlotState,
    SlotStep,
    _Ahead,
    _Copy,
    _Counted,
    _Failure,
    _Guess,
    _Routing,
    _Rows,
    _Slots,
    _Span,
)
from sglang_uvm_offload.memory.protocol import Location, Span
from sglang_uvm_offload.memory.slots import (
    AHEAD_ROWS,
    MAX_ALIGNED,
    MAX_EXPERTS,
    MAX_GUESSES,
    MAX_POOL_EXPERTS,
    MAX_REQUESTS,
    MAX_TENSORS,
    NO_TENSORS,
    BlockLists,
)

_SIGNATURES: dict[str, list[type]] = {
    "uvm_allocate": [c_int, c_size_t, c_size_t, c_void_p, POINTER(c_void_p), POINTER(c_void_p)],
    "uvm_free": [c_int, c_void_p],
    "uvm_place": [c_int, c_void_p, POINTER(_Span), c_int, c_int, c_void_p],
    "uvm_prefer_host": [c_int, c_void_p, c_size_t, c_void_p],
    "uvm_populate": [c_int, c_void_p, POINTER(_Span), c_int, c_int],
    "uvm_time_reads": [c_int, c_void_p, c_int, c_void_p],
    "uvm_copy_layer": [c_int, POINTER(_Copy), c_int, c_char_p, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p],
    "uvm_read_pieces": [c_void_p, c_int, c_size_t, c_void_p, c_void_p],
    "uvm_memory_info": [c_int, POINTER(c_size_t), POINTER(c_size_t)],
    "uvm_versions": [POINTER(c_int), POINTER(c_int)],
    "uvm_count_routing": [POINTER(_Counted), c_int, c_int, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p],
    "uvm_count_histogram": [c_void_p, c_int, c_int, c_int, c_void_p, c_void_p, c_void_p],
    "uvm_begin_step": [c_void_p, c_longlong, c_longlong, c_void_p, c_void_p],
    "uvm_resolve_slots": [POINTER(_Slots), POINTER(_Rows), c_void_p, POINTER(_Routing), POINTER(_Ahead), c_int, c_void_p],
    "uvm_bring_slots": [POINTER(_Slots), POINTER(_Rows), c_void_p, c_int, c_void_p, c_void_p, c_void_p],
    "uvm_fill_slots": [c_int, POINTER(_Rows), c_int, c_void_p, POINTER(_Ahead), c_int, c_void_p],
    "uvm_look_ahead": [c_int, POINTER(_Slots), POINTER(_Rows), c_void_p, POINTER(_Guess), POINTER(_Ahead), c_void_p],
}
"""The argument types of each function that can fail, without the final ``uvm_failure*``."""


@functools.cache
def load_ops(arch: str) -> CudaOps:
    """The library for ``arch``, built if needed and loaded once per process. Raises ``cuda.build.BuildFailure``."""
    library = build(arch)
    try:
        return CudaOps(library)
    except OSError as error:  # from the loader, for example if the CUDA runtime was removed
        raise BuildFailure(f"cannot load the CUDA library: {error}; remove {library.parent} to rebuild it") from error


def device_ops(device: int) -> CudaOps:
    return load_ops(device_arch(device))


class CudaOps:
    """The loaded library. Addresses and stream handles are plain ints. Functions with an argument ``caller``, the caller's
    stream, fail while that stream is capturing a graph."""

    def __init__(self, library: Path):
        self._lib = ctypes.CDLL(str(library))
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._lib, name)
            function.argtypes = [*arguments, POINTER(_Failure)]
            function.restype = c_int
        self._places = {Location.DEVICE: self._lib.uvm_place_device(), Location.HOST: self._lib.uvm_place_host()}
        self._ids = {torch.int32: self._lib.uvm_ids_int32(), torch.int64: self._lib.uvm_ids_int64()}
        self._packed = self._lib.uvm_ids_packed()
        self._lib.uvm_use_host_node.argtypes = [c_int, c_int]
        self._lib.uvm_use_host_node.restype = None
        self.max_experts: int = self._lib.uvm_max_experts()
        self.max_counted: int = self._lib.uvm_max_counted()
        """The most layers per ``count_routing``."""
        self.max_copies: int = self._lib.uvm_max_copies()
        """The most tensors per ``copy_layer``."""
        assert (self._lib.uvm_max_rows(), self._lib.uvm_max_slot_experts()) == (MAX_TENSORS, MAX_EXPERTS)
        assert (self._lib.uvm_max_pool_experts(), self._lib.uvm_max_requests()) == (MAX_POOL_EXPERTS, MAX_REQUESTS)
        assert self._lib.uvm_max_aligned() == MAX_ALIGNED
        assert (self._lib.uvm_ahead_rows(), self._lib.uvm_max_guesses()) == (AHEAD_ROWS, MAX_GUESSES)
        self.ahead_blocks: int = self._lib.uvm_ahead_blocks()
        self.ahead_words: int = self._lib.uvm_ahead_words()
        self.gain_kinds: int = self._lib.uvm_gain_kinds()
        self.pool_chunk: int = self._lib.uvm_pool_chunk()
        self.max_fills: int = self._lib.uvm_max_fills()
        self._slot_classes: int = self._lib.uvm_slot_classes()

    def versions(self) -> tuple[int, int]:
        """The CUDA runtime in use, and the newest that the driver supports, as 1000 * major + 10 * minor."""
        runtime, driver = c_int(), c_int()
        self._call("uvm_versions", runtime, driver)
        return runtime.value, driver.value

    # Memory.

    def use_host_node(self, device: int, node: int | None) -> None:
        """From now on, put the host pages of ``device`` on NUMA node ``node``; None for the node of the calling thread."""
        self._lib.uvm_use_host_node(device, -1 if node is None else node)

    def allocate(self, device: int, nbytes: int, align: int, caller: int) -> tuple[int, int]:
        """(base, address): the pointer to pass to ``free``, and the aligned start."""
        base, address = c_void_p(), c_void_p()
        self._call("uvm_allocate", device, nbytes, align, caller, base, address)
        assert base.value
        assert address.value
        return base.value, address.value

    def free(self, device: int, base: int) -> None:
        self._call("uvm_free", device, base)

    def place(self, device: int, address: int, spans: Sequence[Span], location: Location, caller: int) -> None:
        """Advise and prefetch all spans, and wait until they have arrived."""
        self._call("uvm_place", device, address, _array(spans), len(spans), self._places[location], caller)

    def prefer_host(self, device: int, address: int, nbytes: int, caller: int) -> None:
        """Advise these bytes to prefer host RAM, without moving them."""
        self._call("uvm_prefer_host", device, address, nbytes, caller)

    def populate(self, device: int, address: int, spans: Sequence[Span], readers: int) -> None:
        """Populate all spans, which must prefer host RAM, and wait: ``readers`` threads (0 to 16) read a byte of each block,
        followed by a prefetch. Callable from any thread that is not capturing a graph. Enough host RAM must be free, or a read
        may hang forever."""
        self._call("uvm_populate", device, address, _array(spans), len(spans), readers)

    def time_reads(self, device: int, addresses: torch.Tensor, times: torch.Tensor) -> None:
        """Measure the first read at each of ``addresses`` (int64 ``[n]``), and the fastest of four including it. Writes GPU
        cycles to ``times`` (32 bits, ``[n, 2]``). Both tensors are pinned. Waits for the reads, on the stream of ``place``."""
        self._call("uvm_time_reads", device, addresses.data_ptr(), len(addresses), times.data_ptr())

    def copy_layer(
        self,
        device: int,
        parts: Sequence[tuple[int, int, int]],
        in_vram: np.ndarray,
        blocks: tuple[int, int],
        claimed: torch.Tensor,
        caller: int,
        stream: int,
    ) -> None:
        """Copy ``parts`` (source address, target address, bytes) on ``stream`` with a kernel that reads each byte wherever it
        is. Addresses are multiples of 16. ``in_vram`` (``bool[n]``) marks which leading 2 MiB blocks of the concatenated
        sources are in VRAM. ``blocks`` are the most thread blocks that read over the link, and that read VRAM. ``claimed`` is
        int32 ``[2]`` in VRAM that no concurrent copy uses."""
        array = (_Copy * len(parts))(*(_Copy(*part) for part in parts))
        bits, count = np.packbits(in_vram, bitorder="little").tobytes(), len(in_vram)
        self._call("uvm_copy_layer", device, array, len(parts), bits, count, *blocks, claimed.data_ptr(), caller, stream)

    def read_pieces(self, pieces: torch.Tensor, nbytes: int, sink: torch.Tensor) -> None:
        """Read ``nbytes`` at each of ``pieces`` (int64 ``[n]`` addresses) with a kernel on torch's current stream. Addresses
        and ``nbytes`` are multiples of 16. ``sink`` is a word of VRAM."""
        self._call("uvm_read_pieces", pieces.data_ptr(), len(pieces), nbytes, sink.data_ptr(), _stream(sink))

    def memory_info(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of VRAM."""
        free, total = c_size_t(), c_size_t()
        self._call("uvm_memory_info", device, free, total)
        return free.value, total.value

    def begin_step(self, control: torch.Tensor, valid_rows: int, phase: int, table: torch.Tensor | None = None) -> None:
        """Begin a step on torch's current stream: the next one has ``valid_rows`` rows that count (0 for none) and belongs to
        ``phase``. With ``table``, also begins it for those slots."""
        _check_control(control)
        begun = None if table is None else table.data_ptr()
        self._call("uvm_begin_step", control.data_ptr(), valid_rows, phase, begun, _stream(control))

    # Routing counters. They run on torch's current stream and may be captured.

    def count_routing(
        self, layers: Sequence[Counted], packed: bool, first_expert: int, control: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Add the routing of up to ``max_counted`` layers to ``counts[layers, 2, 2, num_experts]`` (int64) on torch's current
        stream. All ids must pass ``check_ids`` and have the same dtype and ``top_k``. With ``packed``, the upper half of each
        int32 is the id."""
        ids = layers[0].ids
        num_experts = self._check_counters(control, counts[0], ids)
        kind = self._packed if packed else self._ids[ids.dtype]
        array = (_Counted * len(layers))(
            *(_Counted(it.ids.data_ptr(), it.ids.size(0), it.ids.stride(0), it.layer, it.in_place) for it in layers)
        )
        pointers = control.data_ptr(), counts.data_ptr(), _stream(ids)
        self._call("uvm_count_routing", array, len(layers), kind, ids.size(1), first_expert, num_experts, *pointers)

    def check_ids(self, ids: torch.Tensor, packed: bool) -> None:
        """Raise ``ValueError`` unless these ids can be counted."""
        if ids.dim() != 2 or ids.dtype not in self._ids or (packed and ids.dtype != torch.int32):
            raise ValueError(f"expert ids are {ids.dtype} {tuple(ids.shape)}, not int32 or int64 [rows, top_k]")
        if ids.numel() and ids.size(1) > 1 and ids.stride(1) != 1:
            raise ValueError(f"the expert ids of a row are {ids.stride(1)} elements apart; they must be contiguous")

    def count_histogram(
        self, histogram: torch.Tensor, control: torch.Tensor, counts: torch.Tensor, *, in_place: bool = True
    ) -> None:
        """Add tokens per expert (int32, for the first experts of ``counts``) to one layer's counts, and activations if
        ``in_place``."""
        num_experts = self._check_counters(control, counts, histogram)
        if histogram.dtype != torch.int32 or not histogram.is_contiguous() or not 0 < histogram.numel() <= num_experts:
            raise ValueError(f"the histogram is {histogram.dtype} {tuple(histogram.shape)}, not int32 [{num_experts}]")
        pointers = control.data_ptr(), counts.data_ptr(), _stream(histogram)
        self._call("uvm_count_histogram", histogram.data_ptr(), histogram.numel(), num_experts, in_place, *pointers)

    # Slots. They run on torch's current stream, and ``resolve_slots`` may be captured.

    def check_slot_table(self, table: torch.Tensor) -> None:
        """Raise ``ValueError`` unless ``table`` is int32 ``[1 + 3 * classes]``: the step, then events, uses and values per
        class."""
        if table.dtype != torch.int32 or table.shape != (1 + 3 * self._slot_classes,) or not table.is_contiguous():
            raise ValueError(f"the table is {table.dtype} {tuple(table.shape)}, not int32 [{1 + 3 * self._slot_classes}]")

    def resolve_slots(
        self,
        state: SlotState,
        table: torch.Tensor,
        ids: torch.Tensor,
        lists: BlockLists,
        step: SlotStep,
        later: frozenset[int] = NO_TENSORS,
        *,
        programmatic: bool = False,
    ) -> None:
        """Resolve a layer that uses the experts ``ids[rows, top_k]``: fill slots (all tensors except those at the addresses
        ``later``), and make or rewrite the lists. With ``programmatic``, the kernel may start before its predecessor ends; the
        predecessor must not resolve the same layer or begin a step."""
        _check_lists(lists, ids, state.fills.device)
        if ids.dim() != 2 or ids.dtype not in self._ids or not ids.is_contiguous():
            raise ValueError(f"expert ids are {ids.dtype} {tuple(ids.shape)}, not contiguous int32 or int64 [rows, top_k]")
        _check_control(step.control)
        _check_int32("requests", step.requests, 1 + 2 * MAX_REQUESTS)
        routed = ids.data_ptr(), self._ids[ids.dtype], *ids.shape
        order = None if lists.order is None else lists.order.data_ptr()
        blocks = lists.blocks.data_ptr(), lists.blocks.numel(), lists.padded.data_ptr(), lists.padded.numel()
        how = (
            lists.block_size,
            lists.read_rows or lists.block_size,
            step.brings,
            step.control.data_ptr(),
            step.requests.data_ptr(),
        )
        routing, (now, _) = _Routing(*routed, order, *blocks, *how), state.tensors(later)
        given = table.data_ptr(), routing, state.ahead_pointers, programmatic, _stream(ids)
        self._call("uvm_resolve_slots", state.pointers, now, *given)

    def bring_slots(
        self, state: SlotState, table: torch.Tensor, beside: int, control: torch.Tensor, brought: torch.Tensor
    ) -> None:
        """Choose slots for all offloaded experts of a layer and write them to ``brought`` (int32 ``[1 + 2 * MAX_EXPERTS]``).
        The pool's layer ``beside`` (-1 for none) keeps its slots."""
        _check_control(control)
        _check_int32("brought", brought, 1 + 2 * MAX_EXPERTS)
        given = table.data_ptr(), beside, control.data_ptr(), brought.data_ptr()
        self._call("uvm_bring_slots", state.pointers, state.tensors()[0], *given, _stream(brought))

    def fill_slots(
        self, state: SlotState, chosen: torch.Tensor, later: frozenset[int] | None, blocks: int, stream: int
    ) -> None:
        """Copy the rows of the experts in ``chosen`` on ``stream``, with ``blocks`` thread blocks. ``chosen`` is either the
        layer's ``fills`` from ``resolve_slots``, for the tensors at the addresses ``later``; or the result of ``bring_slots``
        with ``later`` None, for all tensors. ``stream`` must be ordered after that call."""
        tensors, ahead = (state.tensors()[0], _Ahead()) if later is None else (state.tensors(later)[1], state.ahead_pointers)
        device, first = chosen.device.index, state.first_slot
        self._call("uvm_fill_slots", device, tensors, first, chosen.data_ptr(), ahead, blocks, stream)

    def look_ahead(
        self, state: SlotState, table: torch.Tensor, ids: torch.Tensor, first_expert: int, control: torch.Tensor
    ) -> None:
        """Copy experts in ``ids[rows, n]`` (likeliest of each row first) until the layer is resolved in this step."""
        _check_control(control)
        if ids.dim() != 2 or ids.dtype not in self._ids or not ids.is_contiguous() or ids.numel() > MAX_GUESSES:
            raise ValueError(f"guesses are {ids.dtype} {tuple(ids.shape)}, not at most {MAX_GUESSES} contiguous int32 or int64")
        guess = _Guess(ids.data_ptr(), self._ids[ids.dtype], *ids.shape, first_expert, control.data_ptr())
        given = state.pointers, state.tensors()[0], table.data_ptr(), guess, state.ahead_pointers, _stream(ids)
        self._call("uvm_look_ahead", ids.device.index, *given)

    def _check_counters(self, control: torch.Tensor, counts: torch.Tensor, source: torch.Tensor) -> int:
        _check_control(control)
        if counts.dtype != torch.int64 or counts.dim() != 3 or counts.shape[:2] != (2, 2) or not counts.is_contiguous():
            raise ValueError(f"counts are {counts.dtype} {tuple(counts.shape)}, not contiguous int64 [2, 2, experts]")
        if counts.size(2) > self.max_experts:
            raise ValueError(f"a layer has {counts.size(2)} experts, but the counters support at most {self.max_experts}")
        if not source.is_cuda or not counts.device == control.device == source.device:
            raise ValueError(
                f"routing on {source.device}, counts on {counts.device}, control on {control.device}: must be one GPU"
            )
        return counts.size(2)

    def _call(self, name: str, *arguments: object) -> None:
        failure = _Failure()
        if getattr(self._lib, name)(*arguments, failure) != 0:
            span = None if failure.span < 0 else failure.span
            raise CudaFailure(failure.call.decode(), failure.error, failure.reason.decode(errors="replace"), span)


def _array(spans: Sequence[Span]) -> ctypes.Array[_Span]:
    return (_Span * len(spans))(*(_Span(span.offset, span.nbytes) for span in spans))


def _check_control(control: torch.Tensor) -> None:
    if control.dtype != torch.int64 or control.shape != (2,) or not control.is_contiguous():
        raise ValueError(f"control is {control.dtype} {tuple(control.shape)}, not contiguous int64 [2]")


def _check_lists(lists: BlockLists, ids: torch.Tensor, device: torch.device) -> None:
    for name, tensor in (("blocks", lists.blocks), ("padded", lists.padded), ("order", lists.order)):
        if tensor is not None and (tensor.dtype != torch.int32 or not tensor.is_contiguous() or tensor.device != device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, not contiguous int32 on {device}")
    if lists.order is not None and ids.numel() * lists.block_size > lists.order.numel():
        raise ValueError(f"cannot align {ids.numel()} ids in blocks of {lists.block_size} with only {lists.order.numel()} rows")


def _check_int32(name: str, tensor: torch.Tensor, size: int) -> None:
    if tensor.dtype != torch.int32 or tensor.shape != (size,) or not tensor.is_contiguous():
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not contiguous int32 [{size}]")


def _stream(tensor: torch.Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream

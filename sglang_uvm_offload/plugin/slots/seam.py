"""Shared code of the runner hooks: finds the layer that a call computes, and checks that slots can serve the whole call."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.experts.takeover import one_run_an_expert
from sglang_uvm_offload.memory.slots import BlockLists
from sglang_uvm_offload.streaming.model_slots import LayerSlots

logger = logging.getLogger(__name__)

_COUNTS = "return_inactive_prefix_count"


class Call(NamedTuple):
    """A call in progress that computes a layer with slots."""

    slots: LayerSlots
    given: dict[str, Any]
    """The arguments of the call, by name."""
    later: frozenset[int]
    """Addresses of the tensors that only the second GEMM reads."""


class Seam(ABC):
    """Base class of the runner hooks. ``find`` returns the slots of the layer that owns the tensor at an address.

    One list indexes the weights, scales, zero points and biases, so all of them must have slot rows. A layer that computes from
    a stream buffer, or from a tensor that it does not own, therefore keeps its list unmodified.
    """

    by_expert: ClassVar[tuple[str, ...]]
    """Names of the tensors that the runner's kernels index by expert."""

    def __init__(self) -> None:
        self.find: Callable[[int], LayerSlots | None] = _nothing
        self._warned: set[str] = set()

    @abstractmethod
    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        """Add the hooks."""

    def serving(self, weights: torch.Tensor, given: dict[str, Any]) -> LayerSlots | None:
        """The slots of the layer that owns ``weights``, if all tensors in ``given`` have slot rows."""
        slots = self.find(weights.data_ptr())
        return slots if slots is not None and self._all_have_rows(slots, given) else None

    def _all_have_rows(self, slots: LayerSlots, given: dict[str, Any]) -> bool:
        for name in self.by_expert:
            tensor = given.get(name)
            if tensor is not None and not _has_rows(slots, tensor):
                self._warn(f"{name} {tuple(tensor.shape)} is not a tensor of the layer, so its experts are read in place")
                return False
        return True

    def _warn(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("Expert offload: slots: %s", what)


class ExpertCalls(Seam):
    """Tracks calls of one SGLang function that computes a layer's experts: it aligns the step's ids, then runs two GEMMs.
    ``by_expert`` are its parameters.

    A layer is resolved when its ids are aligned. Tensors that only the second GEMM reads are filled while the first one
    runs."""

    first: ClassVar[tuple[str, ...]]
    """The function's positional parameters. Callers pass all others by name."""
    second: ClassVar[tuple[str, ...]]
    """Names of the tensors that only the second GEMM reads."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None
        """The call in progress, if slots serve it."""

    def around_experts(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = kwargs | dict(zip(self.first, args, strict=False))
        slots = self.serving(given["w1"], given) if len(args) <= len(self.first) else None
        if slots is not None:
            self.call = Call(slots, given, self._later(slots, given))
        try:
            out = original(*args, **kwargs)
        finally:
            self.call = None
            unawaited = slots is not None and slots.await_fills()
        if slots is not None and unawaited:  # no hook ran before the second GEMM
            raise RuntimeError(f"MoE layer {slots.layer_id} was computed before its slots were filled")
        return out

    def _later(self, slots: LayerSlots, given: dict[str, Any]) -> frozenset[int]:
        addresses = {name: _storage(given[name]) for name in self.by_expert if given.get(name) is not None}
        before = {address for name, address in addresses.items() if name not in self.second}
        return frozenset(slots.row_bytes.keys() & (set(addresses.values()) - before))

    def around_align(self, original: Callable[..., Any], ids: torch.Tensor, block_size: int, *args: Any, **kwargs: Any) -> Any:
        """Hook on SGLang's aligners. They return the rows ordered by expert, the expert of each block, and the number of rows
        in blocks, with a flag followed by the number of blocks without an expert."""
        call = self.call
        if call is None:
            return original(ids, block_size, *args, **kwargs)
        lists = call.slots.align(ids, block_size, 1 + kwargs.get(_COUNTS, False), call.later) if _known(args, kwargs) else None
        if lists is None:
            lists = original(ids, block_size, *args, **kwargs)
            call.slots.resolve(ids, BlockLists(lists[1], lists[2], block_size), call.later)
        return lists

    def before_gemm(self, weights: torch.Tensor) -> None:
        """Call this before each of the two GEMMs."""
        if self.call is not None and weights.data_ptr() == self.call.given["w2"].data_ptr():
            self.call.slots.await_fills()


def _known(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an aligner got only the number of experts and the flag."""
    return len(args) <= 1 and kwargs.keys() <= {"num_experts", _COUNTS}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _nothing(address: int) -> None:
    return None


def _has_rows(slots: LayerSlots, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has slot rows after its experts. An empty tensor needs none."""
    if not tensor.numel():
        return True
    nbytes = slots.row_bytes.get(_storage(tensor))
    return nbytes is not None and tensor.dim() > 0 and one_run_an_expert(tensor, nbytes)

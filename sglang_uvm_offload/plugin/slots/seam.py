"""Common code of the hooks on the runners: which layer's experts a call computes, and whether slots can serve the whole
call."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from sglang.srt.plugins.hook_registry import HookType

from sglang_uvm_offload.experts.takeover import one_run_an_expert
from sglang_uvm_offload.streaming.model_slots import LayerSlots

logger = logging.getLogger(__name__)


class Call(NamedTuple):
    """A call that computes a layer with slots."""

    slots: LayerSlots
    given: dict[str, Any]
    """The arguments of the call, by name."""


class Seam(ABC):
    """Base class of the hooks of any runner. ``find`` returns the slots of the layer that has a tensor at an address.

    A layer that computes from a stream buffer, or from a tensor that is not its own, keeps its list: the same list indexes the
    weights, scales, zero points and biases, and each of them must have the slot rows.
    """

    by_expert: ClassVar[tuple[str, ...]]
    """The names of the tensors that the runner's kernels index by expert."""

    def __init__(self) -> None:
        self.find: Callable[[int], LayerSlots | None] = _nothing
        self._told: set[str] = set()

    @abstractmethod
    def install(self, add: Callable[[str, Any, HookType], None]) -> None:
        """Add the hooks."""

    def serving(self, weights: torch.Tensor, given: dict[str, Any]) -> LayerSlots | None:
        """The slots of the layer that has ``weights``, if all tensors in ``given`` have the slot rows."""
        slots = self.find(weights.data_ptr())
        return slots if slots is not None and self._all_have_rows(slots, given) else None

    def _all_have_rows(self, slots: LayerSlots, given: dict[str, Any]) -> bool:
        for name in self.by_expert:
            tensor = given.get(name)
            if tensor is not None and not _has_rows(slots, tensor):
                self._tell(f"{name} {tuple(tensor.shape)} is not one of the layer's tensors, so its experts are read in place")
                return False
        return True

    def _tell(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            logger.warning("Expert offload: slots: %s", what)


class ExpertCalls(Seam):
    """Tracks calls of one SGLang function that computes a layer's experts. ``by_expert`` are its parameters."""

    first: ClassVar[tuple[str, ...]]
    """The positional parameters of the function. Its callers pass all others by name."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None
        """The call in progress, if slots can serve it."""

    def around_experts(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = kwargs | dict(zip(self.first, args, strict=False))
        slots = self.serving(given["w1"], given) if len(args) <= len(self.first) else None
        if slots is not None:
            self.call = Call(slots, given)
        try:
            return original(*args, **kwargs)
        finally:
            self.call = None


def _nothing(address: int) -> None:
    return None


def _has_rows(slots: LayerSlots, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has slot rows after its experts. An empty tensor needs none."""
    if not tensor.numel():
        return True
    nbytes = slots.row_bytes.get(tensor.untyped_storage().data_ptr())
    return nbytes is not None and tensor.dim() > 0 and one_run_an_expert(tensor, nbytes)

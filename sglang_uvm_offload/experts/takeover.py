"""Takes over a layer's expert memory: serves PyTorch's allocations from managed memory.

A tensor belongs to the experts if its first dimension is the layer's number of local experts. That holds for every
quantisation, so this module depends on no format, model or runner.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Allocate = Callable[[int, torch.device, str], torch.Tensor | None]
"""(bytes of one expert, device, description) -> ``uint8[E * bytes]``, a storage in managed memory, or None to leave the
allocation to PyTorch."""

_aten = torch.ops.aten
_SIZED = {_aten.empty.memory_format, _aten.zeros.default, _aten.ones.default, _aten.full.default}
_SIZED |= {_aten.rand.default, _aten.randn.default, _aten.empty_strided.default}
_NEW = {_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default}
_LIKE = {_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default}
_UNINITIALISED = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
}
_ZEROED = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default}
_WRITES: dict[Any, Callable[[torch.Tensor, Any], object]] = {
    **dict.fromkeys(_ZEROED, lambda out, args: out.zero_()),
    **dict.fromkeys((_aten.ones.default, _aten.new_ones.default, _aten.ones_like.default), lambda out, args: out.fill_(1)),
    **dict.fromkeys((_aten.full.default, _aten.full_like.default), lambda out, args: out.fill_(args[1])),
    _aten.new_full.default: lambda out, args: out.fill_(args[2]),
    _aten.rand.default: lambda out, args: out.uniform_(),
    _aten.randn.default: lambda out, args: out.normal_(),
}
"""What an allocation writes into the new tensor, given its own arguments."""

Write = Callable[[torch.Tensor, Callable[[], object], bool], None]
"""(tensor from ``Allocate``, a function that writes its first values, whether these are zeros)."""


def write_now(flat: torch.Tensor, write: Callable[[], object], zeros: bool) -> None:
    write()


class AllocationMode(TorchDispatchMode):
    """While active, contiguous tensors ``[num_experts, ...]`` come from ``allocate``, and ``write`` gives them their values.

    This does not intercept allocations inside an operator (a clone, a repack): ``ExpertLayer.sync_tensors`` moves those.
    """

    def __init__(self, num_experts: int, allocate: Allocate, write: Write = write_now):
        super().__init__()
        self.num_experts = num_experts
        self.allocate = allocate
        self.write = write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIZED:
            size, like = args[0], None
        elif func in _NEW:
            size, like = args[1], args[0]
        elif func in _LIKE:
            size, like = args[0].shape, args[0]
        else:
            return func(*args, **kwargs)
        if not size or size[0] != self.num_experts or kwargs.get("pin_memory"):
            return func(*args, **kwargs)
        # A meta tensor gives this call's dtype and strides without taking memory.
        template = func(*(_meta(a) for a in args), **{**kwargs, "device": "meta"})
        device = torch.device(kwargs.get("device") or (like.device if like is not None else "cpu"))
        if device.type == "meta" or template.layout is not torch.strided or not template.is_contiguous():
            return func(*args, **kwargs)
        expert_bytes = math.prod(template.shape[1:]) * template.dtype.itemsize
        flat = self.allocate(expert_bytes, device, describe(template))
        if flat is None:
            return func(*args, **kwargs)
        out = flat.view(template.dtype).view(template.shape)
        if (write := _WRITES.get(func)) is not None:
            self.write(flat, functools.partial(write, out, args), func in _ZEROED)
        else:
            assert func in _UNINITIALISED, func
        return out


class WatchWrites(TorchDispatchMode):
    """While active, calls ``on_write`` with each storage that an operator writes to."""

    def __init__(self, on_write: Callable[[torch.UntypedStorage], None]):
        super().__init__()
        self.on_write = on_write

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
                    for tensor in given if isinstance(given, (list, tuple)) else [given]:
                        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                            self.on_write(tensor.untyped_storage())
        return func(*args, **kwargs)


@dataclasses.dataclass(frozen=True, eq=False)
class HeldTensor:
    """A reference to an attribute that holds an expert tensor. It keeps the holder alive, not the tensor."""

    get: Callable[[], torch.Tensor]
    """Returns the current tensor; raises if there is none any more."""
    put: Callable[[torch.Tensor], None]
    """Replaces the tensor; a parameter stays the same object."""
    name: str = ""
    """The name of the attribute."""

    def __str__(self) -> str:
        return f"{self.name} ({describe(self.tensor)})"

    @property
    def tensor(self) -> torch.Tensor:
        return self.get()


def held_tensors(holders: Sequence[object]) -> Iterator[HeldTensor]:
    """The parameters, buffers and tensor attributes of the holders (a layer and its quantisation method). Also searches their
    dataclasses: Triton's MXFP4 kernels keep weights in them."""
    seen: set[int] = set()

    def held(
        value: object, get: Callable[[], torch.Tensor], put: Callable[[torch.Tensor], None], at: str
    ) -> Iterator[HeldTensor]:
        if isinstance(value, torch.Tensor):
            if isinstance(value, torch.nn.Parameter):
                yield HeldTensor(lambda: get().data, lambda tensor: setattr(get(), "data", tensor), at)
            else:
                yield HeldTensor(get, put, at)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and id(value) not in seen:
            seen.add(id(value))
            for name in [field.name for field in dataclasses.fields(value)]:
                # Frozen dataclasses are changed too: the values stay the same, only their address changes.
                put = functools.partial(object.__setattr__, value, name)
                yield from held(getattr(value, name, None), functools.partial(getattr, value, name), put, f"{at}.{name}")

    for holder in holders:
        modules = (holder._parameters, holder._buffers) if isinstance(holder, torch.nn.Module) else ()
        for store in (*modules, vars(holder)):
            for name, value in list(store.items()):
                get, put = functools.partial(store.__getitem__, name), functools.partial(store.__setitem__, name)
                yield from held(value, get, put, name)


@dataclasses.dataclass(frozen=True)
class HeldStorage:
    """All tensors of the holders in one storage, which has an expert tensor first. Keeps neither alive."""

    held: Sequence[HeldTensor]

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.held[0].tensor.untyped_storage()

    @property
    def device(self) -> torch.device:
        return self.held[0].tensor.device

    def expert_bytes(self, num_experts: int) -> int | None:
        """The bytes of each expert, if the storage holds one run of them per expert and nothing else; otherwise None."""
        experts = [held.tensor for held in self.held if _of_experts(held.tensor, num_experts)]
        nbytes = experts[0].stride(0) * experts[0].element_size()
        whole = self.storage.nbytes() == num_experts * nbytes
        return nbytes if whole and all(one_run_an_expert(tensor, nbytes) for tensor in experts) else None

    def move(self, flat: torch.Tensor, copy: bool = True) -> None:
        """Make ``flat`` (uint8) the storage of the tensors. ``copy``: first copy their bytes into it. Shapes, strides and
        parameter objects stay."""
        if copy:
            flat.copy_(torch.empty(0, dtype=torch.uint8, device=flat.device).set_(self.storage))
        for held in self.held:
            tensor = held.tensor
            held.put(flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))


def expert_storages(holders: Sequence[object], num_experts: int) -> list[HeldStorage]:
    """The storages, if not empty, of tensors ``[num_experts, ...]``."""
    by_address: dict[int, list[HeldTensor]] = {}
    for held in held_tensors(holders):
        if held.tensor.device.type != "meta" and held.tensor.numel():
            by_address.setdefault(held.tensor.untyped_storage().data_ptr(), []).append(held)
    groups = [sorted(group, key=lambda held: not _of_experts(held.tensor, num_experts)) for group in by_address.values()]
    return [HeldStorage(group) for group in groups if _of_experts(group[0].tensor, num_experts)]


def _of_experts(tensor: torch.Tensor, num_experts: int) -> bool:
    return bool(tensor.ndim) and tensor.shape[0] == num_experts


def describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def one_run_an_expert(tensor: torch.Tensor, expert_bytes: int) -> bool:
    """Whether expert ``e`` of ``tensor`` lies in the bytes ``[e * expert_bytes, (e + 1) * expert_bytes)`` of its storage."""
    item = tensor.element_size()
    inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
    first = tensor.storage_offset() * item
    return bool(tensor.stride(0) * item == expert_bytes and first + inner * item <= expert_bytes)


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value

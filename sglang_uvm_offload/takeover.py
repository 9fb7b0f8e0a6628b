"""Taking over a layer's expert memory: what PyTorch would allocate lies in managed memory instead.

A tensor belongs to the experts if its first dimension is the layer's number of local experts. That holds in every
quantisation, so nothing here knows a format, a model or a runner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Allocate = Callable[[int, torch.device, str], torch.Tensor | None]
"""(bytes of one expert, device, description) -> ``uint8[E * bytes]`` in managed memory, or None to leave it alone."""

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


class AllocationMode(TorchDispatchMode):
    """While active, allocations of contiguous tensors ``[num_experts, ...]`` come from ``allocate``.

    What an operator allocates inside itself (a clone, a repack) is not seen; ``move_into_managed`` takes that over afterwards.
    """

    def __init__(self, num_experts: int, allocate: Allocate):
        super().__init__()
        self.num_experts = num_experts
        self.allocate = allocate

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
        # A meta tensor tells the dtype, strides and device rules of this very call without taking memory.
        template = func(*(_meta(a) for a in args), **{**kwargs, "device": "meta"})
        device = torch.device(kwargs.get("device") or (like.device if like is not None else "cpu"))
        if device.type == "meta" or template.layout is not torch.strided or not template.is_contiguous():
            return func(*args, **kwargs)
        expert_bytes = math.prod(template.shape[1:]) * template.dtype.itemsize
        flat = self.allocate(expert_bytes, device, describe(template))
        if flat is None:
            return func(*args, **kwargs)
        out = flat.view(template.dtype).view(template.shape)
        if func in (_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default):
            out.zero_()
        elif func in (_aten.ones.default, _aten.new_ones.default, _aten.ones_like.default):
            out.fill_(1)
        elif func in (_aten.full.default, _aten.full_like.default):
            out.fill_(args[1])
        elif func is _aten.new_full.default:
            out.fill_(args[2])
        elif func is _aten.rand.default:
            out.uniform_()
        elif func is _aten.randn.default:
            out.normal_()
        else:
            assert func in _UNINITIALISED, func
        return out


def expert_tensors(module: torch.nn.Module, num_experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters, buffers and attributes that are tensors ``[num_experts, ...]``, by name."""
    for store in (module._parameters, module._buffers, vars(module)):
        for name, value in store.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == num_experts:
                yield name, value.data if isinstance(value, torch.nn.Parameter) else value


def move_into_managed(
    module: torch.nn.Module, num_experts: int, is_managed: Callable[[torch.Tensor], bool], allocate: Allocate
) -> None:
    """Move each expert tensor of ``module`` that is not managed yet into memory from ``allocate``, one storage at a time.

    Shapes, strides, parameter objects and tensors that share a storage stay as they are. A tensor whose experts are not
    separate runs of bytes (experts interleaved by a transposed first dimension) stays where it is.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in expert_tensors(module, num_experts):
        if tensor.device.type != "meta" and tensor.numel() and not is_managed(tensor):
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    while by_storage:
        _, group = by_storage.popitem()
        storage = group[0][1].untyped_storage()
        expert_bytes, rest = divmod(storage.nbytes(), num_experts)
        if rest or not all(_one_run_an_expert(tensor, expert_bytes) for _, tensor in group):
            continue
        flat = allocate(expert_bytes, group[0][1].device, describe(group[0][1]))
        if flat is None:
            continue
        flat.copy_(torch.empty(0, dtype=torch.uint8, device=flat.device).set_(storage))
        for name, tensor in group:
            moved = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            parameter = module._parameters.get(name)
            if parameter is not None:
                parameter.data = moved
            elif name in module._buffers:
                module._buffers[name] = moved
            else:
                setattr(module, name, moved)


def describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _one_run_an_expert(tensor: torch.Tensor, expert_bytes: int) -> bool:
    item = tensor.element_size()
    inner = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
    first = tensor.storage_offset() * item
    return bool(tensor.stride(0) * item == expert_bytes and first + inner * item <= expert_bytes)


def _meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value

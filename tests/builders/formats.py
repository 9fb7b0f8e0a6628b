"""Builds SGLang's MoE layers of each format on a CPU. SGLang's own code builds, loads and processes them, with the plugin's
hooks or without."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.tiny import EXPERTS, tiny_config
from builders.configs import served_config
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType, initialize_moe_config
from sglang.srt.runtime_context import SpawnRanks, create_context, get_flags, override_platform, use_context
from sglang.srt.server_args import ServerArgs
from simulated_driver import SimulatedDriver
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_uvm_offload.cpu.counters import CpuRoutingCounters
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.memory.layout import PAGE_BYTES
from sglang_uvm_offload.plugin.rank.fused_moe import _EXPERTS, LayerHooks
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.placement import InitialPlacement

E, HIDDEN, INTERMEDIATE = 5, 1024, 1024
"""With these sizes, 8-bit scales per 16 values are as large as the smallest placed tensor, and no other dimension is ``E``."""

ALLOCATIONS = {
    *(torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.full.default),
    *(torch.ops.aten.new_empty.default, torch.ops.aten.new_zeros.default, torch.ops.aten.empty_like.default),
}


@contextmanager
def runtime(runner: str, gpu: Mapping[str, bool]) -> Iterator[None]:
    """Sets SGLang up as a scheduler of one rank with ``--moe-runner-backend runner``, on a GPU with the facts ``gpu``."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(tiny_config("Qwen3MoeForCausalLM", EXPERTS).to_dict()))
        arguments = ServerArgs(model_path=folder, device="cpu", attention_backend="torch_native", mem_fraction_static=0.3)
        context = create_context(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=0, gpu_id=0))
    with use_context(context), override_platform(**gpu):
        initialize_moe_config()
        with get_flags().moe.override(runner_backend=MoeRunnerBackend(runner)):
            yield


class Peak(TorchDispatchMode):
    """Tracks peak bytes in tensors with a page or more per expert, from what operators return."""

    def __init__(self, memory: SimulatedDriver | None, experts: int):
        super().__init__()
        self.experts, self.least, self._memory = experts, experts * PAGE_BYTES, memory
        self._plain: dict[int, tuple[StorageWeakRef, int, bool]] = {}
        """Storages outside managed memory, by identity: bytes, and whether a computing operator made it."""
        self.total = 0
        self.computed = 0
        """Peak bytes outside managed memory; without managed memory, minus allocations for experts, which would be managed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.note(each, computed=func not in ALLOCATIONS or each.shape[:1] != (self.experts,))
        return out

    def note(self, tensor: torch.Tensor, computed: bool) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return
        if storage.nbytes() >= self.least and not self.is_managed(tensor):
            self._plain.setdefault(
                storage._cdata, (StorageWeakRef(storage), storage.nbytes(), computed or self._memory is not None)
            )
        plain = self.plain()
        self.total = max(self.total, plain + sum(each.managed.nbytes for each in self._ranges()))
        self.computed = max(self.computed, sum(nbytes for _, nbytes, computed in self._plain.values() if computed))

    def plain(self) -> int:
        """Live bytes outside managed memory."""
        self._plain = {key: each for key, each in self._plain.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes, _ in self._plain.values())

    def is_managed(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return any(each.managed.address <= address < each.managed.address + each.managed.nbytes for each in self._ranges())

    def _ranges(self) -> list[Any]:
        return [] if self._memory is None else list(self._memory._live.values())


@dataclasses.dataclass
class Loaded:
    """A layer after building, loading and processing."""

    layer: FusedMoE
    memory: SimulatedDriver | None
    peak: Peak
    """The peak while it was processed."""

    @property
    def experts(self) -> ExpertLayer:
        return self.layer.__dict__[_EXPERTS][0]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors of the layer, its quantisation method and its scheme, by where they are held."""
        return dict(held(self.layer, "", set()))


def held(value: Any, at: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield at, value
        return
    if id(value) in seen or isinstance(value, type | ExpertLayer):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list | tuple):
        inside = list(enumerate(value))
    elif type(value).__module__.startswith(("sglang.", "triton_kernels.")) and hasattr(value, "__dict__"):
        inside = list(vars(value).items())
    else:
        return
    for name, each in inside:
        yield from held(each, f"{at}.{name}", seen)


def build(quantization: Callable[[], Any], managed: bool, **arguments: Any) -> Loaded:
    """Builds, loads and processes a layer inside ``runtime``. ``arguments`` go to SGLang's ``FusedMoE``."""
    memory, hooks = SimulatedDriver() if managed else None, LayerHooks({})
    usual = {"top_k": 2, "params_dtype": torch.bfloat16, "routing_method_type": RoutingMethodType.Renormalize}
    given = {"num_experts": E, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, **usual, **arguments}
    with pytest.MonkeyPatch.context() as patch:
        taking: Any = nullcontext()
        if memory is not None:
            for name, around in (("__init__", hooks._around_init), ("__setattr__", hooks._around_setattr)):
                hooked = functools.partialmethod(_hooked, around, getattr(FusedMoE, name))
                patch.setattr(FusedMoE, name, hooked)
            config = served_config(num_resident=2)
            manager = OffloadManager(config, memory, CpuRoutingCounters, lambda decide: decide(), progress=lambda: False)
            taking = hooks.taking_over(manager, model := manager.begin_model(draft=False))
        with taking:
            layer = FusedMoE(layer_id=0, quant_config=quantization(), prefix="model.layers.0.mlp", **given)
        if memory is not None:
            manager.place_model(model, InitialPlacement(config, None))
    load(layer)
    peak = Peak(memory, given["num_experts"])
    for _, tensor in held(layer, "", set()):
        peak.note(tensor, computed=False)
    with peak:
        layer.quant_method.process_weights_after_loading(layer)
    return Loaded(layer, memory, peak)


def _hooked(layer: FusedMoE, around: Callable[..., None], original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    around(original, layer, *args, **kwargs)


def load(layer: FusedMoE, seed: int = 0) -> None:
    """Loads a checkpoint's tensors one by one through each parameter's loader."""
    quantization = None if layer.quant_config is None else layer.quant_config.get_name()
    for name, parameter in list(layer.named_parameters()):
        which, _, suffix = name.partition("_")
        if not hasattr(parameter, "weight_loader"):
            continue
        if quantization == "mxfp4":  # gpt-oss stacks all experts of a layer in one tensor
            loaded = values(parameter.shape, parameter.dtype, name, seed)
            parameter.weight_loader(parameter, loaded, f"experts.{name}", None, None)
            continue
        if "bias" in name:  # only gpt-oss checkpoints have biases
            continue
        for expert in range(parameter.shape[0]):
            for shard, file in (("w1", "gate_proj"), ("w3", "up_proj")) if which == "w13" else (("w2", "down_proj"),):
                shape, dtype = shard_shape(layer, parameter, name), parameter.dtype
                if quantization == "nvfp4_online":  # quantised from BF16 while loading
                    if suffix not in ("weight", "input_scale"):
                        continue
                    if suffix == "weight":
                        shape, dtype = [shape[0], 2 * shape[1]], torch.bfloat16
                loaded = values(shape, dtype, name, seed + expert)
                parameter.weight_loader(parameter, loaded, f"experts.{expert}.{file}.{suffix}", shard, expert)


def shard_shape(layer: FusedMoE, parameter: torch.Tensor, name: str) -> list[int]:
    """Returns the shape of an expert's tensor in a checkpoint."""
    shape = [*parameter.shape[1:]]
    if name.endswith("weight_shape"):
        return [2]
    if sum(shape) <= 2:
        return []
    by_columns = layer.use_triton_kernels or getattr(parameter, "is_transposed", False)
    if name.startswith("w13") and "g_idx" not in name:
        shape[-1 if by_columns else 0] //= 2
    stored_by_rows = layer.use_triton_kernels or ("WNA16" in type(layer.scheme).__name__ and "zero" not in name)
    return shape[::-1] if stored_by_rows else shape


@functools.cache
def pool() -> torch.Tensor:
    return torch.randint(0, 256, (1 << 24,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)


def values(shape: Any, dtype: torch.dtype, name: str, seed: int) -> torch.Tensor:
    """Draws weights from arbitrary bits, and scales that are valid numbers of their dtype."""
    random = torch.Generator().manual_seed(seed + len(name))
    if "input_scale" in name or "input_global_scale" in name:
        return torch.full([*shape], 0.5).to(dtype)
    if "scale" in name and (dtype is torch.float8_e8m0fnu or not dtype.is_floating_point):
        return torch.randint(120, 127, [*shape], generator=random).to(torch.uint8).view(dtype)
    if "scale" in name:
        return (torch.rand([*shape], generator=random) / 8 + 0.06).to(dtype)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    start = 4096 * int(torch.randint((len(pool()) - nbytes) // 4096, (), generator=random))
    return pool()[start : start + nbytes].view(dtype).view(*shape)
